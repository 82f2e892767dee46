"""What the records cannot decide: other readings of the same evidence, and what to run to know. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradtrace.analysis.scene import lies_within
from gradtrace.analysis.verdict_model import Candidate, Cause, Finding
from gradtrace.printable import shell_word
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.schema import Record

_MADE_BY_A_MODULE = frozenset({Cause.MODULE, Cause.BETWEEN, Cause.BACKWARD, Cause.BACKWARD_BETWEEN})
_FROM_ANOTHER_RANK = frozenset({Cause.GRADIENT, Cause.CHANGED_GRADIENT})


def candidates_for(
    finding: Finding,
    elsewhere: Sequence[tuple[Finding, bool]],
    infos: Sequence[RunInfo],
    gap: tuple[int, int] | None,
    *,
    watched: bool = False,
) -> tuple[Candidate, ...]:
    """Return the readings that remain beside ``finding``.

    ``elsewhere`` are other ranks' findings of the same step, each with whether it came later in the rank's order;
    ``gap`` are the first and last of the steps just before that were not recorded; ``watched`` is true where the step
    was not captured in full.
    """
    info = next((info for info in infos if info.rank == finding.row.rank), infos[0])
    return (
        *_rivals(finding, info),
        *(_other_rank(other, later) for other, later in elsewhere),
        *_only_watched(finding, info, watched),
        *_unrecorded_steps(finding, info, gap),
        *_left_out_modules(finding, info),
        *_missing_ranks(finding, infos),
    )


def _rivals(finding: Finding, info: RunInfo) -> Iterator[Candidate]:
    for row in finding.rivals:
        if row.tensor == "buffer":
            why = f"{row.path} is non-finite at the end of the step; if it was so before, it is the cause"
            command = f"look for code that writes {row.path} between the steps"
            yield _candidate("parameter", row, why, command)
            continue
        why = "the backward pass went bad there by itself, if the forward value had nothing to do with it"
        yield _candidate("backward", row, why, _record(info, row.step))


def _other_rank(other: Finding, later: bool) -> Candidate:
    row = other.row
    why = f"rank {row.rank} made a non-finite value of its own in the same step"
    if later:
        why += (
            ", or received it there: it came later in the pass (tensor or pipeline parallel models communicate in it)"
        )
    return _candidate(other.cause.phase, row, why, f"gradtrace first-nan --rank {row.rank} RUN")


def _only_watched(finding: Finding, info: RunInfo, watched: bool) -> Iterator[Candidate]:
    row = finding.row
    if watched and row.tensor in ("output", "loss", "grad"):
        why = f"step {row.step} was only watched: which module inside made it is not recorded"
        yield _candidate(finding.cause.phase, row, why, _record(info, row.step))


def _unrecorded_steps(finding: Finding, info: RunInfo, gap: tuple[int, int] | None) -> Iterator[Candidate]:
    if gap is None:
        return
    first, last = gap
    row = finding.row
    which = f"step {first} was" if first == last else f"steps {first} to {last} were"
    why = f"{which} not recorded: it may have begun there"
    if finding.cause in _MADE_BY_A_MODULE and row.module in _owners(info, row.module):
        why += f", with a parameter of {row.module or 'the root'} that had gone bad"
    yield Candidate("parameter", first, row.module, "param", why, _record(info, row.step, first))


def _owners(info: RunInfo, module: str | None) -> set[str | None]:
    return {m.name for m in info.modules if m.name == module and m.parameters}


def _left_out_modules(finding: Finding, info: RunInfo) -> Iterator[Candidate]:
    maker = finding.maker
    if maker is None or not (info.config.get("include") or info.config.get("exclude")):
        return
    below = [m for m in info.modules if m.name != maker and lies_within(m.name, maker) and not m.calls]
    if below and finding.cause in _MADE_BY_A_MODULE:
        why = f"{below[0].name} below it was left out of the recording ({len(below)} modules were)"
        command = _record(info, finding.row.step) + "  (without --include and --exclude)"
        yield Candidate(finding.cause.phase, finding.row.step, below[0].name, finding.row.tensor, why, command)


def _missing_ranks(finding: Finding, infos: Sequence[RunInfo]) -> Iterator[Candidate]:
    present = {info.rank for info in infos}
    absent = [rank for rank in range(max(info.world_size for info in infos)) if rank not in present]
    if absent and finding.cause in _FROM_ANOTHER_RANK:
        why = f"the recordings of {len(absent)} other ranks are not here: it may have been received from them"
        yield _candidate("backward", finding.row, why, "gradtrace first-nan on the directory of all ranks")


def _candidate(phase: str, row: Record, why: str, command: str) -> Candidate:
    return Candidate(phase, row.step, row.module, row.tensor, why, command)


def _record(info: RunInfo, step: int, first: int | None = None) -> str:
    """Return the command that records the steps in question in full."""
    # A recording is somebody's file: what it calls a script could be an option of ours.
    is_script = info.command and (not info.command[0].startswith("-") or info.command[0] == "-m")
    script = " ".join(map(shell_word, info.command)) if is_script else "SCRIPT"
    return f"gradtrace record --steps {step if first is None else first}:{step + 1} {script}"
