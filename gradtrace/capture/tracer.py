"""``Tracer``: ties the parts of the capture together and writes what they see, step by step.

Here stand the life of a recording (start, steps, stop) and nothing of how things are seen or measured.
"""

from __future__ import annotations

import os
import platform
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradtrace
from gradtrace.capture import interception
from gradtrace.capture.backward import BackwardWatch, GraphGradients
from gradtrace.capture.calls import Calls
from gradtrace.capture.clock import Belongs, Clock
from gradtrace.capture.compiled import NOTE, EagerWhileRecording
from gradtrace.capture.hooks import ModuleHooks, NoGradients
from gradtrace.capture.launch import Launch
from gradtrace.capture.log import StepLog
from gradtrace.capture.names import ModuleEntry, Names, unwrapped
from gradtrace.capture.parameters import OptimizerWatch, ParameterWatch
from gradtrace.capture.rows import RowBuffer
from gradtrace.capture.schedule import Schedule
from gradtrace.capture.session import Session
from gradtrace.errors import CaptureError
from gradtrace.trace.runinfo import RunInfo
from gradtrace.trace.writer import RunWriter

Engine = Literal["graph", "hooks"]
Models = nn.Module | Mapping[str, nn.Module] | None


class Tracer:
    """Records the training of one or several models.

    Args:
        models: the model, several by name, or None for every model that this process calls.
        path: where the recording is to be; with several ranks, a directory with a file for each.
        engine: ``graph`` sees everything; ``hooks`` registers torch's own hooks on every module.
        every: capture every Nth step.
        steps: capture the steps from the first up to, not including, the second; None leaves an end open.
        first_step: the number of the first step, for a training that is resumed.
        include, exclude: glob patterns of the modules to record or to leave out.
        existing: what to do with an older run at ``path``.
        command: the command line that the file is to show.

    Raises:
        CaptureError: an option makes no sense, or ``path`` cannot be written.
        RunExistsError: an older run is at ``path``.
    """

    def __init__(
        self,
        models: Models = None,
        path: str | os.PathLike[str] = "run.parquet",
        *,
        engine: Engine = "graph",
        every: int = 1,
        steps: tuple[int | None, int | None] | None = None,
        first_step: int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        existing: Literal["refuse", "overwrite", "move_aside"] = "refuse",
        command: Sequence[str] = (),
    ) -> None:
        if engine not in ("graph", "hooks"):
            raise CaptureError(f"no such engine: {engine!r}; it is 'graph' or 'hooks'")
        schedule = Schedule(every, *(steps or (None, None)))
        self._launch = Launch.of_environment()
        self._path = Path(path)
        self._existing: Literal["refuse", "overwrite", "move_aside"] = existing
        self.info = RunInfo(
            run_id=self._launch.run_id or uuid.uuid4().hex,
            gradtrace_version=gradtrace.__version__,
            attempt=self._launch.attempt,
            rank=self._launch.rank,
            world_size=self._launch.world_size,
            command=list(command),
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            config={
                "engine": engine,
                "every": every,
                "steps": list(steps) if steps else None,
                "first_step": first_step,
                "include": list(include),
                "exclude": list(exclude),
            },
        )
        self._models = _named(models)
        self._hooks: ModuleHooks | None = None
        self._build(engine, schedule, Names(include, exclude), Clock(first_step), discover=models is None)

    def _build(self, engine: Engine, schedule: Schedule, names: Names, clock: Clock, *, discover: bool) -> None:
        session = Session(names, schedule, clock, RowBuffer(self.info.rank))
        session.on_failure = self._capture_failed
        self._session = session
        self._graph = GraphGradients(session)
        if engine == "hooks":
            self._hooks = ModuleHooks(session)
        self._calls = Calls(
            session,
            self._graph if self._hooks is None else NoGradients(),
            self._outermost_call,
            discover=discover,
        )
        self._parameters = ParameterWatch(session)
        self._backward = BackwardWatch(session, self._backward_ended)
        self._optimizers = OptimizerWatch(
            session, self._parameters.optimizer_begins, self._optimizer_stepped, self._loss_scale
        )
        self._eager = EagerWhileRecording()
        self._log: StepLog | None = None
        self._dirty = False

    # Life ---------------------------------------------------------------------------------------------------

    def start(self) -> Tracer:
        """Open the file and watch from now on."""
        if self._log is not None:
            raise CaptureError("a tracer can be started once; make another one")
        names = self._session.names
        for label, model in self._models.items():
            if self._hooks is not None:
                from gradtrace.capture.hooks import refuse_in_place

                refuse_in_place(model)
            names.add_root(unwrapped(model), label)
        self.info.started = _now().isoformat()
        writer = RunWriter(self._path, self.info, existing=self._existing)
        self._log = StepLog(self._session, writer, self.info)
        self._process = os.getpid()
        if self._models and self._hooks is not None:
            for root in names.roots:
                self._hooks.register(root, self._calls)
        else:
            interception.add(self._calls)
        self._backward.install()
        self._optimizers.install()
        self._eager.install()
        return self

    def stop(self, end: str = "completed") -> RunInfo:
        """Write what is in flight, finish the file and leave nothing behind; ``end`` says how the run ended."""
        self._stop(end, quickly=False)
        return self.info

    def stop_quickly(self, end: str) -> RunInfo:
        """Like ``stop`` when there is no time, as in a signal handler: close the parts and leave them."""
        self._stop(end, quickly=True)
        return self.info

    def __enter__(self) -> Tracer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop("completed" if kind is None else f"exception {kind.__name__}")

    def _stop(self, end: str, *, quickly: bool) -> None:
        log = self._log
        if log is None or log.closed or os.getpid() != self._process:
            return
        session = self._session
        self._detach()
        if session.active:
            try:
                self._close_step()
                session.statistics.resolve()
                log.write_late()
            except Exception as error:
                session.fail(error)
        session.active = session.capturing = False
        if session.failure is not None:
            end = f"tracer failed: {session.failure}"
        if self._eager.used:
            self.info.notes.append(NOTE)
        log.close(end, quickly=quickly)

    def _detach(self) -> None:
        interception.remove(self._calls)
        self._backward.remove()
        self._optimizers.remove()
        self._eager.remove()
        self._parameters.stop()
        if self._hooks is not None:
            self._hooks.remove()

    def _capture_failed(self, reason: str) -> None:
        self._detach()

    # What may be asked ---------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """What the commands and ``gradtrace.open_run`` take, also while recording."""
        return self._log.writer.run_path if self._log is not None else self._path

    @property
    def run_path(self) -> Path:
        """The same as ``path``."""
        return self.path

    @property
    def moved_to(self) -> Path | None:
        """Where an older run was moved to, if one was."""
        return self._log.writer.moved_to if self._log is not None else None

    @property
    def bytes_written(self) -> int:
        """Size of the recording in bytes."""
        return self._log.writer.bytes_written if self._log is not None else 0

    # Steps --------------------------------------------------------------------------------------------------

    def step(self, number: int | None = None) -> None:
        """Count by hand: what follows belongs to step ``number``, or to the next step.

        Without a number, a step in which nothing has been seen yet goes on: the call may stand at the start or
        at the end of the loop's body. From the first call on, optimizers no longer end steps.
        """
        self._session.guarded(self._step_by_hand)(number)

    def _step_by_hand(self, number: int | None) -> None:
        self._session.clock.count_by_hand()
        if number == self._session.clock.step or (number is None and not self._dirty):
            return
        self._close_step()
        self._next_step(number)

    def _close_step(self) -> None:
        """Hand the rows in flight to the log as the step's last."""
        session = self._session
        fired = self._graph.never_fired()
        if fired:
            session.unmeasured["gradient never arrived (output unused, or changed in place)"] += fired
        if self._log is not None:
            self._log.end_step(session.clock.step)
        self._dirty = False

    def _next_step(self, number: int | None = None) -> None:
        session = self._session
        session.clock.next_step(number)
        session.statistics.forget()
        self._parameters.forget_arrivals()
        if self._hooks is not None:
            self._hooks.forget_calls()
        session.capturing = session.active and session.schedule.captures(session.clock.step)

    # What the parts report -----------------------------------------------------------------------------------

    def _outermost_call(self, entry: ModuleEntry, evaluating: bool) -> None:
        session = self._session
        if session.clock.starts_step(evaluating=evaluating):
            if session.clock.backward_in_step and session.capturing:
                self._parameters.record_states(None)
            self._close_step()
            self._next_step()
        session.clock.outermost_call(evaluating=evaluating)
        self._dirty = True
        self._parameters.root_begins(entry.root)
        if self._hooks is not None:
            self._hook_late(entry)

    def _hook_late(self, entry: ModuleEntry) -> None:
        """Hook a root that was found by its first call; that call is seen from its inner modules on."""
        assert self._hooks is not None
        self._hooks.register(entry.root, self._calls)

    def _backward_ended(self, accumulating: bool) -> None:
        self._dirty = True
        self._session.clock.backward_ended(accumulating=accumulating)
        self._graph.backward_ended()
        self._session.statistics.resolve()

    def _loss_scale(self, scale: Tensor) -> None:
        session = self._session
        if session.capturing:
            with torch.no_grad():
                session.record("optimizer", None, "loss_scale", "0", scale, once=False)

    def _optimizer_stepped(self, optimizer: Optimizer, skipped: bool, inside_backward: bool) -> None:
        session = self._session
        clock = session.clock
        self._dirty = True
        belongs = clock.optimizer_stepped(optimizer, inside_backward=inside_backward)
        if skipped and session.capturing:
            session.rows.append(
                clock.micro_step,
                "event",
                None,
                None,
                "skip",
                "",
                None,
                "GradScaler skipped the optimizer step",
            )
        if belongs is Belongs.THIS_STEP:
            if session.capturing:
                self._parameters.record_states(optimizer)
            self._close_step()
            self._next_step()
            return
        if session.capturing:
            self._parameters.record_parameters_of(optimizer)
        if belongs is Belongs.STEP_BEFORE and self._log is not None:
            self._log.extend_step(clock.step - 1, clock.continue_step_before())
            self._parameters.forget_arrivals()


def trace(
    models: Models,
    path: str | os.PathLike[str] = "run.parquet",
    *,
    engine: Engine = "graph",
    every: int = 1,
    steps: tuple[int | None, int | None] | None = None,
    first_step: int = 0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overwrite: bool = False,
) -> Tracer:
    """Return a tracer to be used in a ``with`` statement; see ``Tracer`` for the arguments.

    Example::

        with gradtrace.trace(model, "run.parquet") as tracer:
            train(model)
        gradtrace.open_run(tracer.path).first_nan()

    Raises:
        CaptureError, RunExistsError: see ``Tracer``; both when the block is entered.
    """
    return Tracer(
        models,
        path,
        engine=engine,
        every=every,
        steps=steps,
        first_step=first_step,
        include=include,
        exclude=exclude,
        existing="overwrite" if overwrite else "refuse",
        command=list(sys.argv),
    )


def _named(models: Models) -> dict[str, nn.Module]:
    if models is None:
        return {}
    if isinstance(models, nn.Module):
        return {type(models).__name__: models}
    wrong: list[Any] = [name for name, model in models.items() if not isinstance(model, nn.Module)]
    if wrong:
        raise CaptureError(f"{wrong[0]!r} is no nn.Module; pass the model, or a mapping of names to models")
    return dict(models)


def _now() -> datetime:
    return datetime.now(timezone.utc)
