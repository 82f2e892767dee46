"""Which of the operations that a replay found explains a verdict. Pure: a finding and rows in, the answer out.

While a run goes on its verdict is not known, so a replay writes down every birth. The finding says where the
value was seen; a forward birth says which outputs its value flowed to, a backward one in which module it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gradtrace.analysis.births import Birth, Explanation, read_births
from gradtrace.analysis.scene import lies_within
from gradtrace.analysis.verdict_model import Cause, Finding
from gradtrace.trace.confirmation import Boundary, Confirmation
from gradtrace.trace.incident import looks_like_mask
from gradtrace.trace.schema import Record

_NO_OPERATION = {
    Cause.BATCH: "the batch arrived with it",
    Cause.INITIAL: "the run started with it",
    Cause.MOVED_IN: "something other than the optimizer wrote it into the weights",
    Cause.CHANGED_GRADIENT: "the gradient was changed between backward and the optimizer step",
    Cause.UPDATE: "the optimizer's update made it",
    Cause.LEARNING_RATE: "the learning rate was not finite",
    Cause.LOSS_SCALE: "GradScaler lowered its scale again and again",
}


def explain(finding: Finding, rows: Sequence[Record], noticed: int) -> Explanation:
    """Return what the replay says of the finding.

    ``rows`` are the rows of phase ``replay`` and the events ``replay`` of the finding's rank, in order of ``seq``,
    from its step on: those of the first step that has any are used. ``noticed`` is the step in which the incident
    showed.
    """
    if finding.cause in _NO_OPERATION:
        why = _NO_OPERATION[finding.cause]
        reason = f"the value was not made by an operation of the forward or backward: {why}"
        return Explanation(Confirmation("not_replayed", reason), recorded=False)
    nearest = _nearest_first(finding.row, rows)
    births = read_births(row for row in nearest if row.phase == "replay")
    events = [row for row in nearest if row.phase == "event"]
    birth = pick(finding, births)
    if events:
        went = Confirmation.from_json(events[0].detail)
        return Explanation(replace(went, reason=_reason(went.reason, finding.row.step, events[0].step)), birth)
    if births:
        return Explanation(Confirmation("not_replayed", "the recording does not say how the replay went"), birth)
    return Explanation(Confirmation("not_replayed", _why_none(finding.row.step, noticed)), recorded=False)


def _nearest_first(row: Record, rows: Sequence[Record]) -> list[Record]:
    """Return the rows of the first step that has any, those of the record's own pass before those of others."""
    of_step = [other for other in rows if other.step == rows[0].step]
    return sorted(of_step, key=lambda other: (other.micro_step != row.micro_step, other.seq))


def _reason(reason: str | None, step: int, replayed: int) -> str | None:
    """Add to the reason that it was a later step that was replayed, where it was."""
    if replayed == step:
        return reason
    later = f"it was step {replayed} of the same incident that was replayed"
    return f"{later}; {reason}" if reason else later


def _why_none(step: int, noticed: int) -> str:
    if step < noticed:
        return f"made in step {step}, but noticed only in step {noticed}, and only the latter can be replayed"
    return "the recording holds no replay of this step"


def pick(finding: Finding, births: Sequence[Birth]) -> Birth | None:
    """Return the birth that explains the finding, None if none does; ``births`` come in order."""
    forward = [birth for birth in births if not birth.in_backward]
    backward = [birth for birth in births if birth.in_backward]
    if finding.cause in (Cause.BACKWARD, Cause.BACKWARD_BETWEEN, Cause.GRADIENT):
        return next(_of_backward(finding, backward), None)
    if finding.maker is None:
        return _first([birth for birth in forward if birth.row.module is None])
    places = {place for row in (finding.row, finding.seen) if (place := _boundary(row)) is not None}
    flowed = _first([birth for birth in forward if places.intersection(birth.detail.flows_to)])
    own = (birth for birth in forward if birth.row.module == finding.maker and not _is_mask(birth))
    return flowed or next(own, None)


def _boundary(row: Record) -> Boundary | None:
    return None if row.module is None or row.call is None else Boundary(row.module, row.call, row.path)


def _first(births: Sequence[Birth]) -> Birth | None:
    """Return the first birth that is no mask; else the first fill that wrote into what is trained, else any.

    Where the constant is a tensor of its own, making that is a fill, too, and says less.
    """
    made = [birth for birth in births if not _is_mask(birth)]
    written = [birth for birth in births if birth.has_node]
    return next(iter([*made, *written, *births]), None)


def _is_mask(birth: Birth) -> bool:
    """Whether the code asked for the value: a constant, or infinities that it computed apart from what is trained."""
    return birth.detail.fill or (looks_like_mask(birth.row) and not birth.has_node)


def _of_backward(finding: Finding, births: Sequence[Birth]) -> Iterator[Birth]:
    """Yield the births that may explain a backward finding, the likeliest first."""
    for fits in _backward_places(finding):
        yield from filter(fits, births)


def _backward_places(finding: Finding) -> Iterator[Callable[[Birth], bool]]:
    """Yield tests of a birth's place, the closest first."""
    maker, row = finding.maker, finding.row
    if finding.cause is Cause.GRADIENT:
        owner = row.module or ""
        yield lambda birth: lies_within(birth.row.module, owner)
        # Code further out used the parameter, or the loss did (a penalty on the weights).
        yield lambda birth: birth.row.module is None or lies_within(owner, birth.row.module)
        # Another module shares it, or boundaries inside of the model were not recorded.
        yield lambda birth: True
    elif maker is None:
        yield lambda birth: birth.row.module is None
    elif finding.cause is Cause.BACKWARD_BETWEEN:
        yield lambda birth: birth.row.module == maker
        yield lambda birth: lies_within(birth.row.module, maker)
    else:
        # Other calls of the module come last: what they returned was recorded, and finite.
        yield lambda birth: lies_within(birth.row.module, maker) and not _is_other_call(birth.row, row)
        yield lambda birth: birth.row.module == maker


def _is_other_call(one: Record, other: Record) -> bool:
    return one.module == other.module and one.call != other.call
