"""``Tracer``: ties the parts of the capture together and writes what they see, step by step.

Here stand the life of a recording (start, steps, stop) and nothing of how things are seen or measured.
"""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

import gradtrace
from gradtrace.capture import interception
from gradtrace.capture.backward import GraphGradients
from gradtrace.capture.backward_watch import BackwardWatch
from gradtrace.capture.calls import Calls
from gradtrace.capture.clock import Clock
from gradtrace.capture.compiled import Compilation, EagerWhileRecording, KeptCompiled
from gradtrace.capture.coverage import scripted_note
from gradtrace.capture.discovery import Discovery
from gradtrace.capture.hooks import ModuleHooks, NoGradients, refuse_in_place
from gradtrace.capture.launch import Launch
from gradtrace.capture.log import StepLog
from gradtrace.capture.loss.lines import LossLines
from gradtrace.capture.loss.watch import LossWatch
from gradtrace.capture.models import Models, named
from gradtrace.capture.names import ModuleEntry, Names, unwrapped
from gradtrace.capture.operations.op_steps import OpRow, OpSteps
from gradtrace.capture.optimizers import OptimizerWatch
from gradtrace.capture.options import Engine, Mode, Options
from gradtrace.capture.own_frames import OwnFrames
from gradtrace.capture.parameters import ParameterWatch
from gradtrace.capture.recheck.capsule import capsule_path, clear_the_way
from gradtrace.capture.recheck.capsule_watch import CapsuleWatch
from gradtrace.capture.recursion import StackRoom
from gradtrace.capture.replay.agreement import Agreement
from gradtrace.capture.replay.alarm import OnNonFinite, Watchman
from gradtrace.capture.replay.kept import Keeper
from gradtrace.capture.replay.passes import Passes
from gradtrace.capture.replay.rerun import Replayer
from gradtrace.capture.rows import RowBuffer
from gradtrace.capture.schedule import Schedule
from gradtrace.capture.session import Session, sessions_in_progress
from gradtrace.capture.statistics import Statistics
from gradtrace.capture.steps import Steps
from gradtrace.capture.voice import warn
from gradtrace.capture.watch.baseline import Baseline
from gradtrace.capture.watch.step import StepWatch
from gradtrace.capture.watch.triggers import Triggers, WatchSchedule
from gradtrace.errors import CaptureError
from gradtrace.printable import shell_word
from gradtrace.trace.runinfo import STOPPED, RunInfo
from gradtrace.trace.secrets import masked
from gradtrace.trace.writer import RunWriter


class Tracer:
    """Records the training of one or several models.

    Args:
        models: the model, several by name, or None for every model that this process calls.
        path: where the recording is to be; with several ranks, a directory with a file for each.
        mode: ``full`` captures every step, or those of ``every`` and ``steps``; ``watch`` only a few, which
            ``triggers`` choose. Steps that are not captured in full are watched.
        engine: ``graph`` sees everything; ``hooks`` registers torch's own hooks on every module.
        every: capture every Nth step in full.
        steps: capture the steps from the first up to, not including, the second; None leaves an end open.
        first_step: the number of the first step, for a training that is resumed.
        include, exclude: glob patterns of the modules to record or to leave out.
        replays: how many failing passes are run again at most, to name the operation; 0 for none.
        on_nonfinite: ``stop`` raises NonFiniteError before bad gradients reach the weights.
        loss_lines: note source lines in the loss code, which costs much only where the loss is very long.
        op_steps: record every operation of these steps, from the first up to, not including, the second.
        capsule_limit: save no capsule of the first failing step that takes more bytes; 0 for none at all.
        max_size: bytes that the recording may take before older steps are thinned out; 0 for no bound.
        triggers: which steps are captured in full with the mode ``watch``.
        baseline: an earlier run; with the mode ``watch`` more steps are captured if its model was another one.
        keep_compiled: let what ``torch.compile`` has compiled run compiled, and see it only from outside.
        existing: what to do with an older run at ``path``.
        command: the command line that the file is to show.
        _on_device: measure tensors of every device as those of an accelerator; for tests.

    Raises:
        CaptureError: an option makes no sense, or ``path`` cannot be written.
        RunExistsError: an older run is at ``path``.
    """

    def __init__(
        self,
        models: Models = None,
        path: str | os.PathLike[str] = "run.parquet",
        *,
        mode: Mode = "full",
        engine: Engine = "graph",
        every: int = 1,
        steps: tuple[int | None, int | None] | None = None,
        first_step: int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        replays: int = 3,
        on_nonfinite: OnNonFinite = "continue",
        loss_lines: bool = True,
        op_steps: tuple[int | None, int | None] | None = None,
        capsule_limit: int = 2**30,
        max_size: int = 2 * 10**9,
        triggers: Triggers | None = None,
        baseline: str | os.PathLike[str] | None = None,
        keep_compiled: bool = False,
        existing: Literal["refuse", "overwrite", "move_aside"] = "refuse",
        command: Sequence[str] = (),
        _on_device: bool | None = None,
    ) -> None:
        options = self._options = Options(
            mode,
            engine,
            every,
            steps,
            first_step,
            tuple(include),
            tuple(exclude),
            replays,
            on_nonfinite,
            loss_lines,
            op_steps,
            capsule_limit,
            max_size,
            triggers or Triggers(),
            baseline,
            keep_compiled,
        )
        self._launch = Launch.of_environment()
        self._others_noted = False
        self._path = Path(path)
        self._existing: Literal["refuse", "overwrite", "move_aside"] = existing
        self.info = RunInfo(
            run_id=self._launch.run_id or uuid.uuid4().hex,
            gradtrace_version=gradtrace.__version__,
            attempt=self._launch.attempt,
            rank=self._launch.rank,
            world_size=self._launch.world_size,
            command=masked(command),
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            config=options.config(),
        )
        self._models = named(models)
        self._build(options, Statistics(on_device=_on_device))

    def _build(self, options: Options, statistics: Statistics) -> None:
        schedule = options.schedule()
        names, clock = Names(options.include, options.exclude), Clock(options.first_step)
        compilation: Compilation = KeptCompiled() if options.keep_compiled else EagerWhileRecording()
        self._compilation, rows = compilation, RowBuffer(self.info.rank)
        session = self._session = Session(names, schedule, clock, rows, statistics, compilation.shield)
        session.on_failure = self._give_up
        self._graph = GraphGradients(session)
        self._hooks = ModuleHooks(session) if options.engine == "hooks" else None
        self._parameters = ParameterWatch(session)
        forget = self._hooks.forget_calls if self._hooks is not None else lambda: None
        limit = options.capsule_limit
        self._capsule = CapsuleWatch(session, self._capsule_path, limit) if limit else None
        keeper = self._keeper = Keeper(self._capsule.call_begins if self._capsule is not None else lambda kept: None)
        if self._hooks is not None:
            keeper.obstacle = "the engine hooks keeps nothing of a pass; the engine graph does"
        self._lines = LossLines() if options.loss_lines else None
        self._loss = LossWatch(session, self._graph if self._hooks is None else NoGradients(), self._lines)
        self._calls = Calls(
            session,
            self._loss,
            self._outermost_call,
            discover=not self._models,
            keeper=keeper if options.keeps_passes else None,
            look_at_state=self._parameters.look_at_state,
            look_at_weights=lambda: self._watch.look_at_weights(),
        )
        self._watch = self._step_watch(options, schedule)
        wanted = options.op_range
        self._op_steps = OpSteps(session, wanted.start, wanted.stop, self._calls.innermost_open, self._add_operation)
        self._backward = BackwardWatch(
            session, self._backward_begins, self._backward_ended, self._op_steps, self._watch.returned
        )
        passes = Passes(session.rows, keeper, self._watchman(options), self._loss, self._capsule)
        steps = self._steps = Steps(
            session, self._parameters, self._graph.never_fired, forget, passes, self._watch, self._step_begins
        )
        observer = self._calls if self._hooks is None else Discovery(session, self._calls, self._hooks)
        self._observer = compilation.observer(observer)
        self._optimizers = OptimizerWatch(
            session, steps.optimizer_begins, steps.optimizer_stepped, steps.loss_scale, steps.loss_scaled
        )
        self._installed: list[_Installed] = [StackRoom(), self._backward, OwnFrames(), self._optimizers, compilation]
        if self._lines is not None:
            self._installed.append(self._lines)
        if self._capsule is not None:
            self._installed.append(self._capsule.batches)
        self._log: StepLog | None = None
        sessions_in_progress.add(session)

    def _watchman(self, options: Options) -> Watchman:
        return Watchman(
            self._session,
            self._keeper,
            Replayer(self._session, self._calls, self._backward, kept_compiled=options.keep_compiled),
            self._loss,
            self._capsule,
            self.info.notes,
            replays=options.replays,
            on_nonfinite=options.on_nonfinite,
            agreement=Agreement(self._keeper, self._session.is_finite),
            verdict_command=lambda: f"gradtrace first-nan {shell_word(str(self.path))}",
            watch=self._watch,
        )

    def _step_watch(self, options: Options, schedule: Schedule | WatchSchedule) -> StepWatch:
        baseline = None
        if options.baseline is not None and options.mode == "watch":
            baseline = Baseline.of(options.baseline, rank=self.info.rank)
        return StepWatch(
            self._session,
            self._parameters,
            schedule if isinstance(schedule, WatchSchedule) else None,
            baseline,
            lambda rows: self._steps.of_step_before(rows),
        )

    # Life ---------------------------------------------------------------------------------------------------

    def start(self) -> Tracer:
        """Open the file and watch from now on."""
        if self._log is not None:
            raise CaptureError("a tracer can be started once; make another one")
        names = self._session.names
        for label, model in self._models.items():
            if self._hooks is not None:
                refuse_in_place(model)
            names.add_root(unwrapped(model), label)
        self.info.started = _now().isoformat()
        writer = RunWriter(self._path, self.info, existing=self._existing, max_bytes=self._options.max_size)
        if self.info.world_size == 1:
            self._session.guarded(clear_the_way)(self._path, writer.moved_to)
        self._log = self._steps.log = StepLog(self._session, writer, self.info)
        self._process = os.getpid()
        if self._models and self._hooks is not None:
            for root in names.roots:
                self._hooks.register(root, self._calls)
        else:
            interception.add(self._observer)
        for part in self._installed:
            part.install()
        self._session.guarded(self._steps.step_begins)()
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
        log, session = self._log, self._session
        if log is None or log.closed or os.getpid() != self._process:
            return
        try:
            session.guarded(self._steps.end_at_once if quickly else self._steps.end)()
            session.guarded(log.complete_info)()
            if session.failure is not None:
                with contextlib.suppress(Exception):  # said already
                    log.complete_info()
        finally:  # one more Ctrl-C may come in the midst of it
            session.active = session.capturing = False
            self._models = {}
            if not quickly:  # what a signal has interrupted may hold a lock, and all is over anyway
                self._detach()
        if session.failure is not None:
            end = f"{STOPPED}{session.failure}"
        modules = session.names.all_modules()
        notes = self._compilation.note(list(self._calls.compiled), modules), scripted_note(modules)
        self.info.notes += [note for note in notes if note is not None]
        try:
            log.close(end, quickly=quickly)
        except Exception as error:
            if not session.cannot_write:
                warn(log.unfinished(error))

    def _give_up(self) -> None:
        """The recording ends before the training does."""
        self._detach()
        if self._log is not None:
            self._log.stopped(f"{STOPPED}{self._session.failure}")

    def _detach(self) -> None:
        with contextlib.ExitStack() as undo:  # goes on when one of them fails
            undo.enter_context(contextlib.suppress(Exception))
            undo.callback(self._parameters.arrivals.stop)
            undo.callback(self._calls.drop)
            undo.callback(self._keeper.drop)
            undo.callback(self._loss.step_ended)
            undo.callback(self._op_steps.step_ends)
            for part in self._installed:
                undo.callback(part.remove)
            undo.callback(interception.remove, self._observer)
            if self._hooks is not None:
                undo.callback(self._hooks.remove)

    def _outermost_call(self, entry: ModuleEntry, evaluating: bool, goes_on: Callable[[], bool]) -> None:
        self._optimizers.look_after()
        self._steps.outermost_call(entry, evaluating, goes_on)

    def _step_begins(self, step: int) -> None:
        self._op_steps.step_begins(step)
        if not self._others_noted and (remark := self._launch.others_unseen) is not None:
            self._others_noted = True
            self.info.notes.append(remark)

    def _capsule_path(self) -> Path:
        return capsule_path(self._path, self.info.rank, self.info.world_size, self.info.attempt)

    def _add_operation(self, row: OpRow) -> None:
        source = (row.op, row.file, row.line)
        self._session.rows.append(
            row.micro_step, row.phase, row.owner, row.call, row.tensor, row.path, row.measure, source=source
        )

    def _backward_begins(self, outputs: Sequence[Any], creates_graph: bool) -> None:
        self._keeper.backward_begins(self._session.rows.position)
        if self._session.capturing:
            self._loss.backward_begins(outputs, create_graph=creates_graph)
        else:
            self._loss.watched_backward_begins(outputs)

    def _backward_ended(self, accumulating: bool, keeps_graph: bool, error: BaseException | None) -> None:
        self._graph.backward_ended()
        self._loss.backward_ended(keeps_graph=keeps_graph)
        self._steps.backward_ended(accumulating, error)

    # What may be asked ---------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """What the commands and ``gradtrace.open_run`` take, also while recording."""
        return self._log.writer.run_path if self._log is not None else self._path

    @property
    def moved_to(self) -> Path | None:
        """Where an older run was moved to, if one was."""
        return self._log.writer.moved_to if self._log is not None else None

    @property
    def in_one_file(self) -> bool:
        """Whether the recording is finished; else it stands in its parts."""
        return self._log is not None and self._log.writer.in_one_file

    @property
    def is_in_place(self) -> bool:
        """Whether what was recorded is still where it was written to."""
        return self._log is not None and (self.in_one_file or self._log.writer.is_in_place)

    @property
    def bytes_written(self) -> int:
        """Size of the recording in bytes."""
        return self._log.writer.bytes_written if self._log is not None else 0

    def step(self, number: int | None = None) -> None:
        """Count by hand: what follows belongs to step ``number``, or to the next step.

        Without a number, a step in which nothing has been seen yet goes on: the call may stand at the start or
        at the end of the loop's body. From the first call on, optimizers no longer end steps.
        """
        self._session.guarded(self._steps.by_hand)(number)


class _Installed(Protocol):
    """What stands in for something of torch's or Python's while a recording runs."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


def _now() -> datetime:
    return datetime.now(timezone.utc)
