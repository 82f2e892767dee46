"""Trainings that get in the way of a recording; each returns all that has come of it, for a comparison bit by bit."""

from __future__ import annotations

import collections
import copy
import functools
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.modules.module as module_hooks
import torch.optim.optimizer as optimizer_hooks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

Fight = Callable[[], Any]
FIGHTS: dict[str, Fight] = {}


def fight(function: Fight) -> Fight:
    """Add a training to the table."""
    FIGHTS[function.__name__] = function
    return function


class Net(nn.Module):
    """A small model with something random and something that keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.act = nn.Tanh()
        self.drop = nn.Dropout(0.3)
        self.bn = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.bn(self.drop(self.act(self.fc1(x)))))


class Training:
    """A model with its optimizer, and the losses so far."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = Net() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.losses: list[Tensor] = []

    def step(self, change: Callable[[Tensor], Tensor] = lambda x: x, optimizer: Any = None) -> None:
        """Train for a step, with another optimizer maybe."""
        optimizer = optimizer or self.optimizer
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(change(torch.randn(8, 6))), torch.randint(3, (8,)))
        loss.backward()
        optimizer.step()
        self.losses.append(loss.detach())

    def anew(self) -> torch.optim.Optimizer:
        """Return an optimizer of what the model consists of now."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def outcome(self, *more: Any) -> list[Any]:
        """Return all that has come of it."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return [self.losses, dict(self.model.state_dict()), gradients, torch.get_rng_state(), *more]


def clear_hooks(model: nn.Module) -> None:
    """Take every hook off every module."""
    for module in model.modules():
        for name, hooks in module.__dict__.items():
            if name.endswith("hooks"):
                hooks.clear()


@contextmanager
def hooks_restored() -> Iterator[None]:
    """Put torch's dictionaries of global optimizer hooks back."""
    before = optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks
    try:
        yield
    finally:
        optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks = before


# Hooks -------------------------------------------------------------------------------------------------------------


@fight
def clears_all_hooks() -> Any:
    t = Training()
    t.model.fc2.weight.register_hook(lambda gradient: clear_hooks(t.model))
    for _ in range(3):
        t.step()
        for parameter in t.model.parameters():
            parameter._backward_hooks = None
        clear_hooks(t.model)
    return t.outcome()


@fight
def replaces_the_dictionaries_of_hooks() -> Any:
    t = Training()
    for _ in range(2):
        t.step()
        for module in t.model.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                setattr(module, name, collections.OrderedDict(getattr(module, name)))
    return t.outcome([len(module._forward_hooks) < 2 for module in t.model.modules()])


@fight
def clears_the_optimizers_hooks() -> Any:
    t = Training()
    with hooks_restored():
        t.step()
        optimizer_hooks._global_optimizer_pre_hooks.clear()
        optimizer_hooks._global_optimizer_post_hooks.clear()
        t.step()
        optimizer_hooks._global_optimizer_pre_hooks = collections.OrderedDict()
        optimizer_hooks._global_optimizer_post_hooks = collections.OrderedDict()
        t.step()
        t.step()
    return t.outcome()


@fight
def adds_hooks_of_every_kind() -> Any:
    t = Training()
    m, seen = t.model, []
    m.fc1.register_forward_hook(lambda *a: a[-1] * 1.5, with_kwargs=True, always_call=True)
    m.fc1.register_forward_pre_hook(lambda module, a, k: ((a[0] + 0.5,), k), with_kwargs=True, prepend=True)
    m.fc2.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    m.fc2.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,), prepend=True)
    m.fc1.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    m.fc2.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.mul_(0.9).norm()))
    t.optimizer.register_step_post_hook(lambda *a: [p.data.clamp_(-1, 1) for p in m.parameters()])
    m.register_state_dict_pre_hook(lambda *a: seen.append("state"))
    m.register_load_state_dict_post_hook(lambda *a: seen.append("loaded"))
    handles = [
        module_hooks.register_module_forward_hook(lambda module, a, result: seen.append(type(module).__name__)),
        module_hooks.register_module_full_backward_hook(lambda module, into, out: seen.append("backward")),
        optimizer_hooks.register_optimizer_step_pre_hook(lambda *a: seen.append("step")),
        torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda all_: seen.append(len(all_))),
    ]
    try:
        for _ in range(2):
            t.optimizer.zero_grad()
            output = m(torch.randn(8, 6))
            output.grad_fn.register_prehook(lambda g: tuple(each * 1.1 for each in g))
            output.grad_fn.register_hook(lambda into, out: seen.append(out[0].sum()))
            loss = nn.functional.cross_entropy(output, torch.randint(3, (8,)))
            loss.register_hook(lambda gradient: gradient * 2)
            loss.backward()
            t.optimizer.step()
            m.load_state_dict(m.state_dict())
    finally:
        for handle in handles:
            handle.remove()
    return t.outcome(seen)


@fight
def has_hooks_that_raise() -> Any:
    t, said = Training(), []
    m = t.model

    def raising(*_: Any) -> None:
        raise ValueError("a hook of the script's")

    places = [
        m.fc2.register_forward_pre_hook,
        functools.partial(m.register_forward_hook, always_call=True),
        m.act.register_full_backward_hook,
        m.fc1.weight.register_hook,
        m.fc1.weight.register_post_accumulate_grad_hook,
        t.optimizer.register_step_pre_hook,
        t.optimizer.register_step_post_hook,
        optimizer_hooks.register_optimizer_step_post_hook,
    ]
    for place in places:
        handle = place(raising)
        try:
            t.step()
        except ValueError as error:
            said.append(str(error))
        handle.remove()
    t.step()
    return t.outcome(said)


# Copies ------------------------------------------------------------------------------------------------------------


@fight
def copies_and_saves_in_the_middle() -> Any:
    class Copying(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = copy.deepcopy(self.fc1)(x)
            return super().forward(x) + y.mean()

    t = Training(Copying())
    inside: list[bytes] = []
    t.model.fc2.weight.register_hook(lambda gradient: inside.append(pickle.dumps(t.model.fc1)))
    t.step()
    average = torch.optim.swa_utils.AveragedModel(t.model.fc1)
    others = [copy.deepcopy(t.model.fc1), pickle.loads(inside[0]), average]
    saved = [saved_bytes(thing) for thing in (t.model.fc1, t.optimizer.state_dict(), others)]
    for other in others:
        other(torch.randn(2, 6)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    t.step()
    average.update_parameters(t.model.fc1)
    return t.outcome(len(inside), saved, [dict(other.state_dict()) for other in others])


def saved_bytes(thing: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


# Calls -------------------------------------------------------------------------------------------------------------


@fight
def swaps_call_and_forward() -> Any:
    class Counting(Net):
        def __call__(self, *args: Any) -> Any:
            self.count = getattr(self, "count", 0) + 1
            return super().__call__(*args)

    class Direct(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    t, names = Training(Counting()), []
    m, present = t.model, nn.Module.__call__

    def announced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names.append(type(module).__name__)
        return present(module, *args, **kwargs)

    t.step()
    with mock.patch.object(nn.Module, "__call__", announced):
        t.step()
    forward = m.fc1.forward
    m.fc1.forward = functools.wraps(forward)(lambda x: forward(x) * 2)
    t.step()
    del m.fc1.forward
    with mock.patch.object(nn.Linear, "forward", lambda layer, x: x @ layer.weight.T):
        t.step()
    m.fc1.__class__ = Direct
    t.step()
    m.__call__ = None
    return t.outcome(names, m.count)


@fight
def calls_forward_without_torchs_call() -> Any:
    class Bare(Net):
        def __call__(self, x: Tensor) -> Tensor:
            return self.forward(x)

    t = Training(Bare())
    t.step()
    t.step()
    return t.outcome()


@fight
def is_made_of_strange_modules() -> Any:
    def raises(*_: Any) -> Any:
        raise RuntimeError("not to be looked at")

    class Meta(type):
        __getattr__ = raises

    class Odd(nn.Linear, metaclass=Meta):
        __slots__ = ("slot",)
        __eq__ = __len__ = __bool__ = __iter__ = __repr__ = raises
        __hash__ = object.__hash__
        inplace = name = property(raises)

    class Strict(Net):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = Odd(6, 8)

        def __len__(self) -> int:
            return 0

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name in self.__dict__["_modules"]:
                return super().__getattr__(name)
            raise KeyError(name)

    t = Training(Strict())
    t.step()
    t.step()
    return t.outcome()


@fight
def counts_what_is_asked_of_its_tensors() -> Any:
    asked: list[str] = []

    class Own:
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(getattr(function, "__name__", ""))
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[misc]

    class OwnTensor(Own, Tensor): ...

    class OwnParameter(Own, nn.Parameter): ...

    t = Training()
    t.model.fc1.weight = OwnParameter(t.model.fc1.weight.detach().clone())
    t.optimizer = t.anew()
    for _ in range(2):
        t.step(lambda x: x.as_subclass(OwnTensor))
    return [list(asked), [loss.as_subclass(Tensor) for loss in t.losses]]


# Modes -------------------------------------------------------------------------------------------------------------


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(self.fc(x) * 0)


def anomaly_state() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


@contextmanager
def anomaly_detection() -> Iterator[None]:
    warnings.simplefilter("always")
    with torch.autograd.detect_anomaly():
        yield


@fight
def sets_anomaly_mode_itself() -> Any:
    t, states = Training(), []
    with warnings.catch_warnings(record=True) as caught, anomaly_detection():
        t.step()
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            t.step()
            states.append(anomaly_state())
        states.append(anomaly_state())
        broken = Root()
        try:
            broken(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            states.append(str(error))
        states.append(anomaly_state())
    states.append(anomaly_state())
    broken(torch.ones(2, 4)).sum().backward()  # replayed
    states.append(anomaly_state())
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        broken(torch.ones(2, 4)).sum().backward()
        states.append(anomaly_state())
    finally:
        torch.autograd.set_detect_anomaly(False)
    shown = [str(w.message) for w in caught if "Traceback of forward call" in str(w.message)]
    # Frames further out than this function are those of the test.
    return t.outcome(states, [text[text.rindex("in sets_anomaly_mode_itself") :] for text in shown], len(shown))


@fight
def sets_modes_of_every_kind() -> Any:
    t, packed, unpacked = Training(), [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.shape)
        return tensor

    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    try:
        with torch.inference_mode():
            t.losses.append(t.model(torch.randn(3, 6)).clone())
        with torch.autograd.set_multithreading_enabled(False), torch.autograd.graph.save_on_cpu():
            t.step()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            t.step()
            t.step(lambda x: x * float("inf"))
        torch.set_grad_enabled(False)
        t.losses.append(t.model(torch.randn(3, 6)))
        with torch.enable_grad():
            t.step()
    finally:
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
    return t.outcome(packed, unpacked)


@fight
def trains_in_another_default_type() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        t = Training()
        t.step()
        t.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return t.outcome()


# Backward and steps ------------------------------------------------------------------------------------------------


@fight
def patches_backward_and_step() -> Any:
    t, calls = Training(), []
    tensors, functions, scalers = torch.Tensor.backward, torch.autograd.backward, torch.amp.GradScaler.step

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return wrapper

    with (
        mock.patch.object(torch.Tensor, "backward", wrapped("tensor", tensors)),
        mock.patch.object(torch.autograd, "backward", wrapped("function", functions)),
    ):
        t.step()
    t.optimizer.step = wrapped("step", t.optimizer.step)
    t.step()
    del t.optimizer.step
    with mock.patch.object(torch.optim.SGD, "step", lambda optimizer, closure=None: calls.append("none")):
        t.step()
    with mock.patch.object(torch.autograd, "_engine_run_backward", lambda *a, **k: calls.append("nothing")):
        t.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with mock.patch.object(torch.amp.GradScaler, "step", wrapped("scaler", scalers)):
        scaler.scale(t.model(torch.randn(4, 6)).sum()).backward()
        scaler.step(t.optimizer)
        scaler.update()
    loss = t.model(torch.randn(4, 6)).sum()
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    t.optimizer.step()
    return t.outcome(calls)


@fight
def draws_from_generators_of_its_own_and_skips_bad_batches() -> Any:
    around = torch.Generator().manual_seed(5)

    class Noisy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.own = torch.Generator().manual_seed(1)
            self.held = {"random": random.Random(2)}

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(1, generator=self.own) + torch.rand(1, generator=around) + self.held["random"].random()
            return super().forward(x) * (1 + 0.01 * noise)

    t = Training(Noisy())
    for factor in (1.0, float("nan"), 1.0):
        t.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(t.model(torch.randn(8, 6)), torch.randint(3, (8,))) * factor
        loss.backward()
        if loss.isfinite():
            t.optimizer.step()
        t.losses.append(loss.detach())
    return t.outcome()


# Models that change ------------------------------------------------------------------------------------------------


@fight
def swaps_its_tensors() -> Any:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        t = Training()
        t.model.register_buffer("large", torch.ones(70_000))
        t.step()
        t.model.to(torch.float64)
        t.step(lambda x: x.double(), t.anew())
        t.model.float()
        t.model.load_state_dict({name: value.clone() for name, value in t.model.state_dict().items()})
        t.step(optimizer=t.anew())
        torch.utils.swap_tensors(t.model.fc1.weight, nn.Parameter(torch.full((8, 6), 0.25)))
        torch.utils.swap_tensors(t.model.bn.running_mean, torch.ones(8))
        torch.utils.swap_tensors(t.model.large, torch.zeros(70_000))
        t.step(optimizer=t.anew())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return t.outcome()


@fight
def changes_its_parts() -> Any:
    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.low = nn.Linear(6, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.low(x)

    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    for module in model.children():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    t = Training(model)
    t.step()
    model.fc1 = LoRA(model.fc1)
    t.optimizer.add_param_group({"params": model.fc1.low.parameters(), "lr": 0.01})
    t.step()
    model.fc1 = model.fc1.base
    model.fc1.requires_grad_(True)
    parametrizations.weight_norm(model.fc1)
    parametrizations.spectral_norm(model.fc2)
    t.step(optimizer=t.anew())
    parametrize.remove_parametrizations(model.fc1, "weight")
    prune.l1_unstructured(model.fc1, "weight", 0.5)
    t.step(optimizer=t.anew())
    prune.remove(model.fc1, "weight")
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    t.step(optimizer=t.anew())
    return t.outcome()
