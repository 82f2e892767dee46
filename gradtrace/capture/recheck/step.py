"""The captured step in a running script: the call, the loss and the backward, up to the optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradtrace.capture import interception
from gradtrace.capture.boundaries import tensors_in_result
from gradtrace.capture.calls import _inside_backward
from gradtrace.capture.compiled import EagerWhileRecording
from gradtrace.capture.interception import Call
from gradtrace.capture.optimizers import _scaler_step
from gradtrace.capture.recheck import remarks
from gradtrace.capture.recheck.anomaly import AnomalyWatch
from gradtrace.capture.recheck.answer import Answer
from gradtrace.capture.recheck.ask import Part
from gradtrace.capture.recheck.capsule import load
from gradtrace.capture.recheck.contents import name_below, restore_rng
from gradtrace.capture.recheck.loaders import CapturedBatch
from gradtrace.capture.recheck.models import Models, load_state
from gradtrace.capture.recheck.parts import Anomaly, StepRecords, in_short
from gradtrace.capture.recheck.plain import rebuild
from gradtrace.capture.roots import find_root
from gradtrace.capture.session import cannot_observe
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import CapsuleError, GradtraceWarning

_MOST_BATCHES = 3
"""So many batches are waited for: the captured call in the first ones, its backward in those after it."""


class CheckedStep:
    """Lets a script run until the captured call, checks the step from there on, and ends the process."""

    def __init__(self, path: str, answer: Answer) -> None:
        self._answer = answer
        self._capsule = capsule = load(path)
        self._models = Models(capsule)
        self._tracer = Tracer(path=answer.path.with_name("step.parquet"), replays=0, loss_lines=False, capsule_limit=0)
        self._anomaly = AnomalyWatch(answer.guarded(self._finish))
        self._batches: CapturedBatch | None = None
        if capsule.loader is not None:
            self._batches = CapturedBatch(capsule.batch, capsule.loader, self._batch_asked_for)
        self._thread = threading.local()
        self._calls = 0
        self._in_vain = 0
        self._begun = False
        self._notes = list(remarks.on_batch(capsule))

    def watch(self) -> None:
        """Wait for the call from now on."""
        warnings.simplefilter("ignore", GradtraceWarning)  # what the tracer would say is the answer
        interception.add(self)
        if self._batches is not None:
            self._batches.install(self._answer.guarded)
        optimizer_begins = self._answer.guarded(self._optimizer_begins)
        register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: optimizer_begins())
        _scaler_step.add(lambda original: _after(optimizer_begins, original))
        EagerWhileRecording().install()

    # Until the call -----------------------------------------------------------------------------------------

    def around(self, call: Call) -> Call:
        """Return the function that stands in for ``nn.Module.__call__``."""
        thread = self._thread
        is_the_one = self._answer.guarded(self._is_the_captured_call)

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "inside", False):
                return call(module, *args, **kwargs)
            thread.inside = True
            try:
                if is_the_one(module):
                    return self._checked(module, args, kwargs)
                return call(module, *args, **kwargs)
            finally:
                thread.inside = False

        return __call__

    def _is_the_captured_call(self, module: nn.Module) -> bool:
        """Give an outermost call's root its captured weights and say whether it is the captured call."""
        if self._begun or not torch.is_grad_enabled() or _inside_backward() or cannot_observe():
            return False
        top, label = find_root(module)
        state = self._models.state_of(top, label)
        if state is None:
            return False
        load_state(top, state)
        root = self._capsule.root
        if state is not root or name_below(top, module) != self._capsule.module:
            return False
        # An evaluation without no_grad is not the step.
        if top.training != root.training.get("", True):
            return False
        self._calls += 1
        return self._calls == self._capsule.number + 1

    def _batch_asked_for(self) -> None:
        """The script asks for a batch: what was expected of the one before has come, or will not come."""
        if self._begun:
            self._in_vain += 1
            if self._anomaly.done or self._in_vain > 1:  # some fetch one batch ahead
                self._finish()
            return
        self._in_vain += self._calls > 0
        if self._in_vain > _MOST_BATCHES:
            raise CapsuleError(f"after a batch {self._called} {self._calls} times; {self._wanted}")
        self._calls = 0

    @property
    def _called(self) -> str:
        return f"{self._capsule.root.label} is called"

    @property
    def _wanted(self) -> str:
        return f"the captured call is number {self._capsule.number + 1}"

    # The step -----------------------------------------------------------------------------------------------

    def _checked(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._answer.guarded(self._begin)(module, args, kwargs)
        result = nn.Module.__call__(module, *args, **kwargs)  # anew: the tracer stands around it by now
        self._answer.guarded(self._returned)(result)
        return result

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        capsule = self._capsule
        if self._batches is not None and not self._batches.count:
            raise CapsuleError(self._batches.missing)
        self._begun = True
        self._in_vain = 0
        self._notes += remarks.on_modes(capsule, find_root(module)[0])
        if self._batches is None:
            args = tuple(rebuild(_get(args, index), value) for index, value in enumerate(capsule.args))
            kwargs = {name: rebuild(kwargs.get(name), value) for name, value in capsule.kwargs.items()}
        else:
            self._notes += remarks.on_inputs(capsule, args, kwargs)
        self._tracer.start()
        self._anomaly.install()
        restore_rng(capsule.rng)
        return args, kwargs

    def _returned(self, result: Any) -> None:
        outputs = tensors_in_result(result)
        for _, tensor in outputs:
            with contextlib.suppress(RuntimeError):  # a view whose base was changed in place
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._gradient_arrives)
        if self._batches is None:
            self._backward_from(dict(outputs))
            self._finish()

    def _gradient_arrives(self, _: Any) -> None:
        self._anomaly.reached = True

    def _backward_from(self, outputs: dict[str, Tensor]) -> None:
        """Run backward with the captured output gradients."""
        pairs = []
        for path, gradient in self._capsule.gradients.items():
            output = outputs.get(path)
            if output is None or output.shape != gradient.shape:
                now = "gone" if output is None else f"of shape {list(output.shape)} now"
                raise CapsuleError(f"output {path} of the call, {list(gradient.shape)} when captured, is {now}")
            if output.requires_grad:
                pairs.append((output, self._usable(path, gradient).to(output.device, output.dtype)))
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def _usable(self, path: str, gradient: Tensor) -> Tensor:
        """Return a captured output gradient; what is not finite in it came of the failure itself."""
        finite = gradient.isfinite()
        bad = int((~finite).sum())
        if bad:
            self._notes.append(
                f"{bad} elements of the captured gradient of output {path} are not finite; 1 stands for them"
            )
        return torch.where(finite, gradient, 1)

    def _optimizer_begins(self) -> None:
        if self._anomaly.done:
            self._finish()

    # The end ------------------------------------------------------------------------------------------------

    def script_ended(self, target: str, how: str, *, failed: bool) -> None:
        """The script has ended by itself: answer with what there is."""
        if self._begun:
            self._finish(
                failure=f"{target} {how} after the captured call began, before its backward() was through", fatal=failed
            )
        root = self._capsule.root
        kind = root.kind.rpartition(".")[2]
        if failed:
            raise CapsuleError(f"{target} {how} before the captured call of {root.label} ({kind})")
        if self._calls:
            raise CapsuleError(f"{target} {how}; {self._called} {self._calls} times; {self._wanted}")
        seen = f"called were {in_short(self._models.seen)}" if self._models.seen else "no model was"
        raise CapsuleError(f"{target} {how}; {root.label} ({kind}) was never called in grad mode for training; {seen}")

    def _finish(self, anomaly: Anomaly | None = None, failure: str = "", *, fatal: bool = False) -> None:
        self._anomaly.remove()
        info = self._tracer.stop()
        if info.end != "completed":
            raise CapsuleError(f"the step could not be recorded: {info.end}")
        records = StepRecords(self._tracer.path)
        loss, gradients = self._loss(records), self._gradients(records, anomaly)
        goes_bad = "not finite" in (loss.status, gradients.status)
        parts = {
            "input": records.input(),
            "forward": records.forward(goes_bad=goes_bad),
            "loss": loss,
            "gradients": gradients,
        }
        complete = gradients.status != "not checked" or self._has_no_gradients
        if fatal and not complete and all(part.status != "not finite" for part in parts.values()):
            raise CapsuleError(failure)
        values = {name: dataclasses.asdict(part) for name, part in parts.items()}
        capsule = self._capsule
        facts = {"step": capsule.step, "failed": capsule.boundary, "complete": complete, "notes": self._notes}
        self._answer.result({**values, **facts})

    @property
    def _has_no_gradients(self) -> bool:
        """Whether the captured step ended with its forward."""
        return self._batches is None and not self._capsule.gradients and not self._capsule.loss_seen

    def _loss(self, records: StepRecords) -> Part:
        if self._batches is None:
            reason = "without a DataLoader the captured output gradients stand for it"
            return Part("not checked", reason=reason)
        return records.loss() or Part("not checked", reason="backward() was not called")

    def _gradients(self, records: StepRecords, anomaly: Anomaly | None) -> Part:
        captured = self._capsule.gradients
        if self._batches is None and not captured:
            return Part("not checked", reason="the capsule has no output gradients")
        if self._batches is None and self._capsule.phase == "loss":
            return Part(
                "not checked", reason="the step failed in the loss, which is not part of a check without a DataLoader"
            )
        if anomaly is None and not self._anomaly.done:
            return Part("not checked", reason="no backward() reached the model")
        return records.gradients(anomaly)


def _after(first: Callable[[], object], original: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    return step


def _get(args: tuple[Any, ...], index: int) -> Any:
    return args[index] if index < len(args) else None
