"""From the operation that made a value to its usual cause and usual mend, for someone who has the line in view.

The table is all there is to it: forward and backward of one operation fail for different reasons. Where the
operation is not known, ``cause_hints`` speaks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gradtrace.analysis.births import Birth, op_name
from gradtrace.analysis.cause_hints import hint_for
from gradtrace.analysis.ranges import LARGEST, largest_magnitude
from gradtrace.analysis.verdict_model import Cause, Finding


class OpHint(NamedTuple):
    """What to say of the operations ``ops``, named as in ATen; None where there is nothing of use.

    ``of_nan`` takes the place of both where the result is NaN, which these make of infinities alone.
    """

    ops: str
    forward: str | None
    backward: str | None
    of_nan: str | None = None


OP_HINTS = (
    OpHint(
        "div true_divide reciprocal remainder fmod addcdiv",
        "the denominator was 0 (0/0 is nan, anything else inf) or close to it: add an epsilon to it, clamp_min "
        "it, or leave the empty case out before the division",
        "the slope divides by the denominator once more, and it was 0 or close to it: put a safe value into it "
        "before the division; torch.where or nan_to_num after it mends only the forward (0 times inf is nan)",
    ),
    OpHint(
        "log log2 log10",
        "log of 0 is -inf and of a negative number nan: clamp_min the argument, or compute in log space "
        "(log_softmax, logsigmoid, logsumexp)",
        "the slope of log is 1/x, infinite at 0: clamp_min the argument; a mask or torch.where after the log "
        "does not stop it",
    ),
    OpHint(
        "log1p",
        "log1p of -1 is -inf and below that nan: keep the argument above -1",
        "the slope of log1p is infinite at -1: keep the argument above it",
    ),
    OpHint(
        "logit",
        "a probability of exactly 0 or 1 has an infinite logit: pass eps=1e-6",
        "the slope is infinite at 0 and 1: pass eps=1e-6, or keep the logits from before the sigmoid",
    ),
    OpHint(
        "logsumexp logcumsumexp logaddexp logaddexp2",
        "a slice that is -inf throughout has a sum of 0: keep one finite entry",
        "where a slice is -inf throughout, its slope is a softmax that is nan: keep one finite entry",
    ),
    OpHint(
        "sqrt",
        "the argument was negative, often by rounding (a variance as mean of squares minus square of mean): "
        "clamp_min it to 0 before the root",
        "sqrt has an infinite slope at 0: add an epsilon inside, or clamp_min before it; torch.where after it "
        "does not help, because both branches get a gradient",
    ),
    OpHint(
        "rsqrt",
        "the argument was 0 (inf) or negative (nan): add an epsilon inside; 1e-8 is 0 in float16",
        "the slope of rsqrt grows with x to the -3/2: add a larger epsilon inside",
    ),
    OpHint(
        "pow float_power",
        "a negative base with a fractional exponent is nan, 0 to a negative power inf, and a large base "
        "overflows: clamp_min the base, or take the power of its magnitude",
        "an exponent below 1 has an infinite slope at a base of 0, and a learned exponent needs the log of the "
        "base: clamp_min the base to an epsilon",
    ),
    OpHint(
        "exp exp2 expm1 sinh cosh",
        "the argument was too large (exp overflows above 88.7 in float32 and 11.1 in float16): subtract the "
        "maximum first (softmax, logsumexp), or clamp the argument",
        "the result is its own slope, and times the gradient it overflowed: clamp the argument further down",
    ),
    OpHint(
        "norm linalg_vector_norm linalg_norm",
        "the sum of squares left the dtype's range: take the norm in float32, or scale the input down",
        "the slope divides by the norm, which was almost 0, or 0 in a gradient of a gradient (a penalty): take the "
        "root of the sum of squares plus an epsilon",
    ),
    OpHint(
        "std var std_mean var_mean",
        "fewer than two values have no unbiased deviation (0/0): drop a last batch of one row, pass "
        "correction=0, or reduce over more",
        "a single value, or values that are almost equal, have no finite slope here: take sqrt(var + eps) over "
        "two or more",
    ),
    OpHint(
        "acos asin atanh erfinv",
        "the argument lay outside of -1 to 1 (by rounding, mostly), or on the edge: clamp it just inside",
        "the slope is infinite at -1 and 1: clamp the argument to within 1e-6 of them before it",
    ),
    OpHint(
        "acosh",
        "the argument lay below 1: clamp_min it to 1",
        "the slope is infinite at 1: clamp_min the argument to just above it",
    ),
    OpHint(
        "atan2 angle hypot",
        None,
        "at the origin, or so close to it that the square is 0 (silence, padding), there is no slope: add an "
        "epsilon before it, or leave such entries out",
    ),
    OpHint(
        "cdist _cdist_forward _euclidean_dist _pdist_forward pdist dist",
        "the distance left the dtype's range: scale the points, or compute in float32",
        "two points that are equal, or almost, have no direction between them: leave out the diagonal, or take "
        "the root of the squared distance plus an epsilon",
    ),
    OpHint(
        "_linalg_svd _linalg_eigh linalg_eig",
        "the decomposition did not converge: look at the matrix's size and condition, and use float64",
        "the slope divides by the differences of singular values or eigenvalues, and two were equal or 0: add "
        "a small jitter, use svdvals or eigvalsh if the vectors are not needed, or detach",
    ),
    OpHint(
        "linalg_cholesky_ex linalg_inv_ex _linalg_solve_ex _linalg_det _linalg_slogdet linalg_lstsq linalg_qr "
        "linalg_pinv linalg_solve_triangular",
        "the matrix was singular or nearly so: add a small multiple of the identity, or use float64",
        "the slope needs the inverse of a matrix that is singular or nearly so: add a small multiple of the "
        "identity, or use float64",
    ),
    OpHint(
        "softmax _safe_softmax log_softmax scaled_dot_product_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_cudnn_attention "
        "_native_multi_head_attention",
        "a row that is masked throughout (-inf everywhere) has no softmax: keep one key visible to each query, "
        "or set those rows to 0 afterwards and mask with a large finite negative",
        "a row that is masked throughout has no slope either: mask with a large finite negative before it, and "
        "not the result after it",
    ),
    OpHint(
        "nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward nll_loss_nd cross_entropy_loss",
        "the mean over labels that are all ignore_index (or of weight 0) is 0/0: skip such a batch, or sum and "
        "divide by max(count, 1); and a label must not point to an entry that is masked with -inf",
        "the slope divides by the number (or weight) of labels that count, and it was 0: skip such a batch, or "
        "sum and divide by max(count, 1)",
    ),
    OpHint(
        "binary_cross_entropy binary_cross_entropy_with_logits",
        "a logit of inf times a label of 0 is nan: leave masked entries out instead of filling them, and keep "
        "labels within 0 to 1",
        "a probability of exactly 0 or 1 has a slope of up to 1e12, and an infinite one for labels that carry a "
        "gradient: use binary_cross_entropy_with_logits, and detach the labels",
    ),
    OpHint(
        "ctc_loss _cudnn_ctc_loss",
        "a label sequence needs at least as many frames as labels, one more for each repeat, else it costs inf: "
        "drop such samples, or pass zero_infinity=True",
        "a sample whose labels need more frames than it has costs inf, and its slope is nan: drop it, or pass "
        "zero_infinity=True",
    ),
    OpHint(
        "kl_div xlogy",
        "a label above 0 met a probability of 0, whose log is -inf: take log_softmax for the input, or clamp_min "
        "the probability",
        "a label of exactly 0 has a log, and so a slope, of -inf: detach the target, or pass log_target=True "
        "with log_softmax of it",
    ),
    OpHint(
        "native_layer_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "cudnn_batch_norm miopen_batch_norm native_group_norm _fused_rms_norm _batch_norm_with_update "
        "_batch_norm_no_update",
        "values that are all equal need an eps above 0, a channel of batch norm needs more than one value, and in "
        "half precision the scaled result may leave the range: run the norm in float32",
        "where the values are almost equal the slope is near 1/sqrt(eps), which a small eps takes out of float16's "
        "range: use a larger eps, or run the norm in float32",
    ),
    OpHint(
        "_weight_norm_interface",
        "a weight vector of zeros has no direction (0/0): do not initialise it with zeros",
        "a weight vector of zeros has no direction (0/0): do not initialise it with zeros",
    ),
    OpHint(
        "cumprod prod",
        "a product of many factors leaves the dtype's range quickly: add up logs instead",
        "the slope is the product of all other factors, and left the dtype's range: add up logs instead",
    ),
    OpHint(
        "mm addmm bmm baddbmm addbmm matmul mv addmv dot linear convolution cudnn_convolution "
        "mkldnn_convolution mkldnn_linear _addmm_activation",
        "a sum of products left the dtype's range: look at how input and weight grew in earlier steps; lower "
        "the learning rate, normalise before it, or compute it in float32 or bfloat16",
        "the gradient times the weights or inputs left the dtype's range: gradients that grow from layer to "
        "layer; clip them, lower the learning rate or the loss scale, or go back fewer steps in time",
        "products overflowed with both signs (inf - inf), or an infinite operand met 0: look at the size of both "
        "operands; compute in float32, and mask with a large finite negative instead of -inf",
    ),
    OpHint(
        "mean",
        "the mean of an empty selection is 0/0: guard the empty case, or sum and divide by max(count, 1); a mean "
        "of large values can overflow as their sum does",
        None,
    ),
    OpHint(
        "sum cumsum add sub rsub index_add scatter_add",
        "the sum left the dtype's range: look at which operand grew in earlier steps (a residual stream that is "
        "never normalised), or add up in float32",
        "gradients of several uses, summed, left the dtype's range: clip them, or lower the loss scale",
        "inf - inf is nan: infinities of both signs met, be it masks of -inf or overflows; mask with a large finite "
        "negative, and add up in float32",
    ),
    OpHint(
        "mul square addcmul mse_loss huber_loss smooth_l1_loss",
        "the product left the dtype's range: scale one factor (for a loss: the targets) down, or multiply in float32",
        "the gradient times the other factor left the dtype's range: scale that factor down, or lower the loss scale",
        "0 times inf is nan: one factor was infinite (in backward, as the forward had left it); make that factor "
        "finite before the product, since multiplying by a mask does not remove it",
    ),
    OpHint(
        "masked_fill where fill index_fill masked_scatter full full_like scalar_tensor constant_pad_nd",
        "it wrote an infinity that the code gave it, which is right before a softmax and fatal before a loss: fill "
        "with torch.finfo(dtype).min, or leave those entries out of the loss",
        None,
    ),
    OpHint(
        "CopySlices index_put _index_put_impl copy _to_copy slice_scatter scatter",
        "the values were written or cast into a narrower dtype and left its range: look at their size, and at the "
        "dtype of the tensor on the left",
        "the gradient was cast to a narrower dtype and left its range: lower the loss scale, or keep the tensor in "
        "float32",
    ),
    OpHint(
        "embedding",
        None,
        "many uses of one row add up in its gradient, and the sum left the dtype's range: lower the loss scale, "
        "or keep the table in float32",
    ),
    OpHint(
        "empty empty_like empty_strided new_empty new_empty_strided",
        "memory that nothing had written was read, and holds whatever was there: fill it first, or use torch.zeros",
        None,
    ),
    OpHint(
        "lgamma digamma polygamma mvlgamma",
        "it has a pole at 0 (a concentration that went to 0): clamp_min the argument",
        "it has a pole at 0 (a concentration that went to 0): clamp_min the argument",
    ),
)

_OWN_FUNCTION = re.compile(r"[A-Za-z_]\w*Backward")
_OWN = (
    "this is an autograd.Function of the code's own: look in its backward for a division, log or root of a "
    "saved value that may be 0, and compare it with torch.autograd.gradcheck"
)

_BY_NAME = {op_name(name): hint for hint in OP_HINTS for name in hint.ops.split()}


def hints_for(finding: Finding, module_type: str | None, birth: Birth | None = None) -> tuple[str, ...]:
    """Return sentences on what usually makes such a value and the usual mend, the likeliest first.

    ``birth`` is the operation that made it, where a replay found one.
    """
    first = (_of_operation(birth) if birth else None) or hint_for(finding, module_type)
    overflow = _overflow(finding, birth)
    return (first, overflow) if overflow else (first,)


def _of_operation(birth: Birth) -> str | None:
    if _OWN_FUNCTION.fullmatch(birth.op):
        return _OWN
    hint = _BY_NAME.get("maskedfill" if birth.detail.fill else op_name(birth.op))
    if hint is None:
        return None
    if hint.of_nan and birth.kind == "NaN":
        return hint.of_nan
    return hint.backward if birth.in_backward else hint.forward


def _overflow(finding: Finding, birth: Birth | None) -> str | None:
    """Return what to say where the value left float16's range, with how near to it the operands were."""
    row = birth.row if birth else finding.seen
    if row.dtype != "float16" or row.nan_count or (birth and birth.detail.fill) or finding.cause is Cause.UPDATE:
        return None
    reached = max(map(largest_magnitude, birth.operands), default=0.0) if birth else 0.0
    beside = f", and the operands reached {reached:.6g}" if reached else ""
    return (
        f"float16 ends at {LARGEST['float16']:.0f}{beside}: run this part in float32 or bfloat16, or scale "
        "its input down"
    )
