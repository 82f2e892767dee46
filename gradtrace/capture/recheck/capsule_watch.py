"""Saves the capsule of a run's first incident: chooses the call and the batch, and says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gradtrace.capture.names import Root
from gradtrace.capture.recheck.batches import Batches
from gradtrace.capture.recheck.capsule import Capsule, save, size_in_words
from gradtrace.capture.recheck.contents import KeptCall, capsule_of
from gradtrace.capture.rows import Row
from gradtrace.capture.session import Session
from gradtrace.errors import CapsuleError
from gradtrace.printable import shell_word
from gradtrace.trace.sent import let_pass
from gradtrace.trace.trouble import in_words

DEFAULT_LIMIT = 2**30


class CapsuleWatch:
    """Watches the DataLoaders, counts the root calls after a batch, and saves one capsule.

    ``path`` is asked for when there is something to save; ``limit`` is the most bytes that the tensors may take.
    """

    def __init__(self, session: Session, path: Callable[[], Path], limit: int = DEFAULT_LIMIT) -> None:
        self.batches = Batches(session)
        self._session = session
        self._path = path
        self._limit = limit
        self._steps = 0
        self._done = False

    def call_begins(self, kept: KeptCall) -> None:
        """A root call has been kept."""
        kept.number_in_step = self._steps, self.batches.call_begins(id(kept.entry))

    def step_ended(self) -> None:
        """Let go of the step's batch."""
        self._steps += 1
        self.batches.forget()

    def incident(self, calls: Sequence[KeptCall], first: Row, rows: Iterable[Row]) -> str | None:
        """Save the capsule of the pass that ``calls`` are kept of, if it is the run's first; say so in one line.

        ``first`` is the first non-finite row of the step, ``rows`` are all of the step. To be called before the
        optimizer changes the weights. Raises nothing: what is in the way is said.
        """
        if self._done:
            return None
        self._done = True
        if not calls:
            return "no capsule is saved: no call of the model in grad mode was kept"
        try:
            path = self._path()
            size = save(path, self._capsule(calls, first, rows), self._limit)
        except (CapsuleError, OSError) as reason:
            let_pass(reason)
            return f"no capsule is saved: {in_words(reason) if isinstance(reason, OSError) else reason}"
        except (MemoryError, RuntimeError) as error:  # out of memory, of a device's too
            let_pass(error)
            return f"no capsule is saved: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        again = f"gradtrace recheck {shell_word(path.name)} SCRIPT"
        return (
            f"the failing step is saved beside the run in {path.name} ({size_in_words(size)}); after the mend: {again}"
        )

    def _capsule(self, calls: Sequence[KeptCall], first: Row, rows: Iterable[Row]) -> Capsule:
        reached = [call for call in calls if call.gradients] or list(calls)
        yielded = self.batches.of_call(reached[0].args, reached[0].kwargs)
        # With the batch the script runs all calls again; without one only the failing call can be.
        chosen = reached[0] if yielded is not None else _call_of(_root_of(first), reached)
        loss = next((row for row in rows if row.tensor == "loss"), None)
        session = self._session
        return capsule_of(
            chosen,
            step=session.clock.step,
            micro_step=session.clock.micro_step,
            boundary=", ".join((f"step {session.clock.step}", first.phase, *_place(first))),
            phase=first.phase,
            number=self._number_of(chosen),
            yielded=yielded,
            roots=session.names.roots,
            loss=None if loss is None else _value(loss),
            loss_seen=loss is not None,
        )

    def _number_of(self, kept: KeptCall) -> int:
        step, number = kept.number_in_step
        return number if step == self._steps else 0


def _root_of(row: Row) -> Root | None:
    root = getattr(row.owner, "root", None)
    return root if isinstance(root, Root) else None


def _call_of(root: Root | None, calls: Sequence[KeptCall]) -> KeptCall:
    """Return the root's first call, else the last of all: the one next to the loss."""
    return next((call for call in calls if call.entry.root is root), calls[-1])


def _place(row: Row) -> tuple[str, ...]:
    """Return module and tensor of a row in words; the loss is in no module."""
    if row.owner is None:
        return ()
    return row.owner.name or "(root)", f"{row.tensor} {row.path}"


def _value(row: Row) -> float | None:
    """Return the number that a row of one element holds."""
    measure = row.measure
    if measure is None or measure.numel != 1:
        return None
    if measure.nan or measure.posinf or measure.neginf:
        return float("nan") if measure.nan else float("inf") if measure.posinf else float("-inf")
    return measure.max
