"""What usually makes this kind of boundary fail, and the usual mend, where the operation is not known."""

from __future__ import annotations

from gradtrace.analysis.scene import kind_of
from gradtrace.analysis.verdict_model import Cause, Finding

_BY_CAUSE = {
    Cause.BATCH: "the data held it: check the samples of this batch and how they are scaled, or fill missing "
    "values before they reach the model",
    Cause.INITIAL: "it was there before the first step: initialise what torch.empty allocated, or check the "
    "checkpoint that was loaded",
    Cause.MOVED_IN: "no gradient of it was seen, so it was not the optimizer: look for code that copies or "
    "averages weights (a checkpoint, an EMA)",
    Cause.BUFFER: "a running statistic took it in: a variance over one element is nan, and one bad batch "
    "stays in a moving average for good",
    Cause.LOSS: "the loss code made it from finite outputs: log(0), 0/0 and the mean of an empty selection "
    "are the usual ones; add an epsilon or guard the empty case",
    Cause.GRADIENT: "what arrived at the module was finite, so the product over the batch overflowed: "
    "lower the loss scale or the learning rate, or sum in float32",
    Cause.CHANGED_GRADIENT: "it was finite when backward made it: look at unscaling, clipping and what other "
    "ranks sent",
    Cause.UPDATE: "the gradients were finite, so the update itself made it: a division by a norm of 0, an eps "
    "too small for the dtype, or too large a step",
    Cause.LEARNING_RATE: "the learning rate was not finite when the optimizer used it: check the scheduler "
    "for 0/0 (a phase of zero steps)",
    Cause.LOSS_SCALE: "the loss scale fell because every step overflowed: the gradients overflow on their "
    "own, or the loss is not finite",
}

_BETWEEN = {
    Cause.BETWEEN: "it was made by code between two calls, not by a layer: look there for exp, log, "
    "division, sqrt, or a sum that leaves the dtype's range",
    Cause.BACKWARD_BETWEEN: "the forward was finite and the slope was not: sqrt, norm, pow and log at 0, 0/0 "
    "that torch.where or a mask hides; clamp the input instead of masking the output",
}

_FORWARD_BY_TYPE = {
    "MultiheadAttention": "a query that may attend to nothing (a fully masked row) makes softmax nan: keep "
    "one key visible, or replace the row afterwards",
    "Softmax": "a row that is -inf throughout makes softmax nan: keep one key, or fill with a large finite negative",
    "LogSoftmax": "a row that is -inf throughout makes log_softmax nan: keep one finite entry",
    "CTCLoss": "a target that needs more frames than there are costs inf: pass zero_infinity=True or drop it",
    "CrossEntropyLoss": "a batch whose labels are all ignored has no mean: skip it, or sum and divide by max(count, 1)",
    "BCELoss": "probabilities that reach 0 or 1 cost inf: use BCEWithLogitsLoss on the logits",
    "BCEWithLogitsLoss": "an infinite logit times 0 is nan: leave masked entries out instead of filling -inf",
    "LayerNorm": "an infinite input becomes nan here: look at what came in",
    "BatchNorm1d": "statistics over one row are undefined in training: drop the last small batch",
    "Linear": "a product left the dtype's range: look at the size of its input and weight in earlier steps",
    "Conv2d": "a product left the dtype's range: look at the size of its input and weight in earlier steps",
}

_INITIAL_BY_TYPE = {
    "Embedding": "rows that were never filled hold whatever the memory held: initialise the whole table, also "
    "the rows that were added to it later",
}

_UPDATE_IN_HALF = (
    "an eps of 1e-8 is 0 in float16, so the update divided by 0: keep float32 weights and use torch.autocast, "
    "or pass an eps of 1e-4 or more"
)

_BY_KIND = {
    ("forward", "NaN"): "finite inputs gave nan: 0/0, inf - inf, 0 * inf, log or sqrt of a negative number",
    ("forward", "Infinity"): "finite inputs gave inf: exp of a large value, a division by 0, or a product "
    "beyond the dtype's range",
    ("forward", "-Infinity"): "finite inputs gave -inf: log(0), or a mask that writes -inf; a mask is right "
    "before softmax and fatal before a loss",
    ("backward", "NaN"): "a finite gradient came in and nan went out: sqrt, norm, pow or a division at 0 "
    "(0 times an infinite slope), or torch.where around one; mend the input, not the output",
    ("backward", "Infinity"): "a finite gradient came in and inf went out: an infinite slope at 0, or a "
    "gradient that grew from layer to layer until it overflowed",
    ("backward", "-Infinity"): "a finite gradient came in and -inf went out: an infinite slope at 0, or a "
    "gradient that grew from layer to layer until it overflowed",
}


def hint_for(finding: Finding, module_type: str | None) -> str:
    """Return a sentence on what usually makes such a value and the usual mend."""
    cause, row = finding.cause, finding.row
    if cause is Cause.MODULE and module_type in _FORWARD_BY_TYPE:
        return _FORWARD_BY_TYPE[module_type]
    if cause is Cause.INITIAL and module_type in _INITIAL_BY_TYPE:
        return _INITIAL_BY_TYPE[module_type]
    if cause is Cause.UPDATE and row.dtype == "float16":
        return _UPDATE_IN_HALF
    return _BY_CAUSE.get(cause) or _BETWEEN.get(cause) or _BY_KIND[cause.phase, kind_of(row)]
