"""The rules of the verdict: one step's records in, what made the first non-finite value out. Pure.

The first non-finite record in order of ``seq`` is the answer, and what was finite just before says what made
it. Records that were non-finite in healthy steps too, that look like a mask, or that died before they reached
anything are set aside first; if nothing else is left, the oldest of them is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradtrace.analysis.scene import Call, Scene, call_of, is_backward, is_bad, is_forward, lies_within
from gradtrace.analysis.verdict_model import Cause, Fate, Finding
from gradtrace.trace.incident import NO_GRADIENT, looks_like_mask
from gradtrace.trace.schema import Record

_STATE = ("param", "buffer")


@dataclass(frozen=True)
class Background:
    """What is known from before the scene.

    ``is_tolerated`` says whether a record's like was non-finite in healthy steps; ``bad_state`` holds, for
    each parameter and buffer that was non-finite before the scene's first record, its latest record.
    """

    is_tolerated: Callable[[Record], bool] = lambda row: False
    bad_state: tuple[Record, ...] = ()


def find_cause(scene: Scene, background: Background) -> Finding:
    """Name the first non-finite boundary of the scene and what made it.

    Raises:
        ValueError: no record of the scene is non-finite.
    """
    path = [row for row in scene.bad if not _is_start_state(row)]
    if not path:
        raise ValueError("a scene without a non-finite record has no cause")
    dismissed: list[Record] = []
    tolerated: list[Record] = []
    for row in path:
        if looks_like_mask(row) or background.is_tolerated(row):
            tolerated.append(row)
        elif row is not path[-1] and died(row, scene):
            dismissed.append(row)
        else:
            first = row
            break
    else:
        first = path[0]
    finding = classify(first, scene, background)
    fates = {row.seq: Fate.PASSED_ON for row in path if row.seq > first.seq}
    fates.update((row.seq, Fate.TOLERATED) for row in tolerated)
    fates.update((row.seq, Fate.CONTAINED) for row in dismissed)
    fates[finding.row.seq] = Fate.PASSED_ON if finding.row.seq > finding.seen.seq else Fate.MADE
    fates[finding.seen.seq] = Fate.PASSED_ON if finding.row.seq < finding.seen.seq else Fate.MADE
    return replace(
        finding,
        fates=fates,
        dismissed=tuple(row for row in dismissed if row is not first),
        all_tolerated=any(row is first for row in [*tolerated, *dismissed]),
        rivals=(*_rivals(first, path, scene), *_late_buffers(finding, scene)),
    )


def _is_start_state(row: Record) -> bool:
    return row.phase == "input" and row.tensor in _STATE


def classify(seen: Record, scene: Scene, background: Background) -> Finding:
    """Say what made ``seen``, the scene's first non-finite record, from what was finite before it."""
    if is_forward(seen):
        return _made_in_forward(seen, scene, background)
    if is_backward(seen):
        return _made_in_backward(seen, scene)
    if seen.tensor == "lr":
        return _made_by_learning_rate(seen, scene)
    return Finding(_cause_outside_calls(seen, scene), seen, seen, seen.module)


def _cause_outside_calls(seen: Record, scene: Scene) -> Cause:
    if seen.tensor == "grad":
        return Cause.CHANGED_GRADIENT if seen.phase == "optimizer" else Cause.GRADIENT
    if seen.tensor == "param":
        return Cause.UPDATE if _had_gradient(seen, scene) else Cause.MOVED_IN
    return {"buffer": Cause.BUFFER, "loss_scale": Cause.LOSS_SCALE}.get(seen.tensor, Cause.LOSS)


def _had_gradient(param: Record, scene: Scene) -> bool:
    """Whether an update can have made the parameter's value: it is seen after one, and there was a gradient.

    In a step that was only watched finite gradients leave no row; a parameter without one says so itself.
    """
    if param.phase != "optimizer" or param.detail == NO_GRADIENT:
        return False
    gradients = [row for row in scene.rows if row.tensor == "grad" and row.seq < param.seq]
    return not gradients or any((row.module, row.path) == (param.module, param.path) for row in gradients)


def _made_by_learning_rate(seen: Record, scene: Scene) -> Finding:
    """The first parameter that the bad learning rate was written into is the boundary; else the rate."""
    params = [row for row in scene.bad if row.tensor == "param" and row.seq > seen.seq]
    row = params[0] if params else seen
    return Finding(Cause.LEARNING_RATE, row, seen, row.module)


def _made_in_forward(seen: Record, scene: Scene, background: Background) -> Finding:
    maker = seen.module if seen.tensor == "output" else scene.enclosing_module(seen)
    state = None if maker is None else bad_state_of(maker, scene, background)
    if state is not None:
        return Finding(Cause.INITIAL, state, seen, state.module)
    if seen.tensor == "output":
        return Finding(Cause.MODULE, seen, seen, maker)
    outer = scene.enclosing(seen)
    if outer is None and maker is None:
        # Without grad mode every argument lacks a history, so there phase does not tell them apart.
        cause = Cause.BETWEEN if seen.phase == "forward" else Cause.BATCH
        return Finding(cause, seen, seen)
    return Finding(Cause.BETWEEN, _exit(outer, "output", scene) or seen, seen, maker)


def _made_in_backward(seen: Record, scene: Scene) -> Finding:
    if seen.tensor == "grad_input":
        return Finding(Cause.BACKWARD, seen, seen, seen.module)
    outer = scene.enclosing(seen)
    row = _exit(outer, "grad_input", scene) or seen
    return Finding(Cause.BACKWARD_BETWEEN, row, seen, scene.enclosing_module(seen))


def _exit(call: Call | None, tensor: str, scene: Scene) -> Record | None:
    """Return where the value left the call that made it: its first non-finite output or grad_input."""
    rows = [] if call is None else [row for row in scene.of_call(call, tensor) if is_bad(row)]
    return rows[0] if rows else None


def bad_state_of(maker: str, scene: Scene, background: Background) -> Record | None:
    """Return a non-finite parameter or buffer that the module's code may have read.

    Its own come first; those of modules below it count if these were not called, because then its own code
    must have read them. -Inf in healthy steps, too, is a mask; +Inf and NaN wait for the batch that reads them.
    """
    within = [row for row in background.bad_state if lies_within(row.module, maker)]
    usable = [row for row in within if not background.is_tolerated(row) or row.nan_count or row.posinf_count]
    own = [row for row in usable if row.module == maker]
    uncalled = [row for row in usable if row.module is not None and not scene.was_called(row.module)]
    return next(iter([*own, *uncalled]), None)


def died(row: Record, scene: Scene) -> bool:
    """Whether the value at this boundary went no further: whatever took it came out finite.

    A value that was dropped forward can still poison the backward pass (0 times infinity), so the gradients
    of those who took it must be finite too.
    """
    if is_backward(row):
        return _died_backward(row, scene)
    if not is_forward(row):
        return False
    takers = scene.takers(row)
    if takers:
        return all(_came_out_finite(call, scene) for call in takers)
    outer = scene.enclosing(row)
    if outer is not None:
        return _came_out_finite(outer, scene) and not _starts_backward(outer.module, scene)
    return _died_in_loss(row, scene)


def _came_out_finite(call: Call, scene: Scene) -> bool:
    outputs = scene.of_call(call, "output")
    return bool(outputs) and not any(map(is_bad, outputs)) and not _poisons_backward(call, scene)


def _poisons_backward(call: Call, scene: Scene) -> bool:
    """Whether the call turns finite gradients into non-finite ones."""
    arrived_bad = any(map(is_bad, scene.of_call(call, "grad_output")))
    return not arrived_bad and any(map(is_bad, scene.of_call(call, "grad_input")))


def _starts_backward(module: str, scene: Scene) -> bool:
    """Whether the backward pass is finite until it comes into this module."""
    first = next((row for row in scene.bad if is_backward(row) or row.tensor == "grad"), None)
    return first is not None and lies_within(first.module, module)


def _died_in_loss(row: Record, scene: Scene) -> bool:
    """An outermost module's value dies in the loss code if the loss and what comes back are finite."""
    losses = [
        later
        for later in scene.rows
        if later.tensor == "loss" and later.seq > row.seq and later.micro_step == row.micro_step
    ]
    back = [bad for bad in scene.bad if bad.tensor == "grad_output" and bad.module == row.module]
    return bool(losses) and not any(map(is_bad, [*losses, *back]))


def _died_backward(row: Record, scene: Scene) -> bool:
    """A gradient that entered a module died there if nothing of that module is non-finite after it."""
    call = call_of(row)
    if row.tensor != "grad_output" or call is None:
        return False
    later = [bad for bad in scene.bad if bad.seq > row.seq and lies_within(bad.module, call.module)]
    left = scene.of_call(call, "grad_input")
    return bool(left) and not any(bad.tensor != "grad_output" or bad.module != row.module for bad in later)


def _rivals(first: Record, path: Sequence[Record], scene: Scene) -> tuple[Record, ...]:
    """Return where else it may have started: a backward pass that went bad by itself, elsewhere.

    The forward value is the older one, but if nothing else was non-finite until a gradient of another module
    was, both readings remain.
    """
    later = [row for row in path if row.seq > first.seq]
    if not is_forward(first) or not later or is_forward(later[0]) or later[0].tensor == "loss":
        return ()
    # Everything lies within a root, so that says nothing; "" and None are passed over alike.
    neighbours = (first.module, scene.enclosing_module(first))
    related = any(lies_within(later[0].module, name) for name in neighbours if name)
    return () if related else (later[0],)


def _late_buffers(finding: Finding, scene: Scene) -> tuple[Record, ...]:
    """Return the maker's buffer that was non-finite when the step ended: its forward, or code before it, wrote it."""
    if finding.cause is not Cause.MODULE:
        return ()
    later = (row for row in scene.rows if row.seq > finding.row.seq and row.tensor == "buffer" and is_bad(row))
    return tuple(row for row in later if row.module == finding.maker)[:1]
