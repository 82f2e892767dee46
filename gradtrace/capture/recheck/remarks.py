"""What is worth a note about a rechecked step, besides what is finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from gradtrace.capture.boundaries import tensors_in_arguments
from gradtrace.capture.names import walk
from gradtrace.capture.recheck.batches import same_elements
from gradtrace.capture.recheck.capsule import Capsule
from gradtrace.capture.recheck.parts import counts_in_words, in_short
from gradtrace.capture.recheck.plain import tensors_in_plain


def on_batch(capsule: Capsule) -> Iterator[str]:
    """Yield where the captured batch is not finite: a mend may clean it before the model sees it."""
    for path, tensor in tensors_in_plain(capsule.batch):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            infinite = tensor.isinf()
            counts = (tensor.isnan(), infinite & (tensor > 0), infinite & (tensor < 0))
            words = counts_in_words([int(count.sum()) for count in counts], tensor.numel())
            yield f"the captured batch is not finite at {path or '0'}: {words}"


def on_modes(capsule: Capsule, top: nn.Module) -> Iterator[str]:
    """Yield which modules are in another mode than in the captured step."""
    then = capsule.root.training
    other = [name or "(root)" for name, m in walk(top) if then.get(name, m.training) != m.training]
    if other:
        yield f"in another mode (train or eval) than when captured: {in_short(other)}"


def on_inputs(capsule: Capsule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield that the model gets something else than it did, though the batch is the captured one."""
    captured = {**{str(index): value for index, value in enumerate(capsule.args)}, **capsule.kwargs}
    then, now = dict(tensors_in_plain(captured)), dict(tensors_in_arguments(args, kwargs))
    if then.keys() != now.keys() or not all(same_elements(then[path], now[path]) for path in then):
        yield "the batch is the captured one, what the script makes of it for the model is not"
