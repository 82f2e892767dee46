"""What a replay needs of the root calls of the pass in flight, kept by reference until the pass is over.

Kept of a call: its arguments (aliases without history, so that no graph lives longer), the generators' states,
autocast, who is in training mode, copies of the buffers, and the gradients that arrive at its outputs. Nothing
here runs anything again.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type

from gradtrace.capture.boundaries import is_computed, tensors_in_arguments
from gradtrace.capture.names import ModuleEntry, Root, walk
from gradtrace.capture.operations.frames import RUNNER, is_users, line_of
from gradtrace.capture.replay.rng import Rng
from gradtrace.capture.rows import Row, RowBuffer
from gradtrace.capture.session import quiet
from gradtrace.trace.confirmation import SourceLine
from gradtrace.trace.sent import let_pass

MOST_CALLS = 32
"""A pass with more root calls than this (a cell called once a time step) is not replayed."""
MOST_GRADIENT_BYTES = 64 * 2**20
"""Output gradients beyond this are let go: holding them would raise the peak of a model with a large vocabulary."""
_GIVEN_UP = 2
_ALWAYS_COPIED = 65_536
"""Buffers up to this many elements are copied at each call: batch norm changes its own without a trace."""
_DEVICES_OF_AUTOCAST = ("cpu", "cuda")

Autocast = tuple[str, bool, torch.dtype]
Callers = tuple[tuple[CodeType, int], ...]
Held = list[tuple[dict[str, Any], dict[str, Any]]]
"""The dictionaries of parameters and of buffers of modules, each with what it held at some time."""


class Alive:
    """Held by the graph of a kept call's outputs, and by nothing else for long: says whether it can still be used."""

    __slots__ = ("__weakref__", "kept")

    def __init__(self, kept: Kept) -> None:
        self.kept = kept


@dataclass(eq=False)
class Kept:
    """One root call in grad mode whose outputs have a graph.

    ``buffers`` maps the id of each buffer to its copy from before the call; ``training`` holds the modules and
    their mode; ``held`` what the modules held as parameters and buffers; ``versions`` the versions of arguments
    and parameters; ``rows_from`` and ``rows_to`` the range of the rows that the call has left; ``gradients`` what
    arrived at the outputs, ``backward_from`` where the rows of the pass begin that brought it. ``reducer`` is the
    DistributedDataParallel that will reduce the gradients. ``cut_off``: the pass has raised.
    """

    entry: ModuleEntry
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]
    rng: Rng
    autocast: tuple[Autocast, ...]
    training: list[tuple[nn.Module, bool]]
    buffers: dict[int, Tensor]
    held: Held
    forward: Any
    callers: Callers
    reducer: DistributedDataParallel | None
    rows_from: int = 0
    rows_to: int = 0
    rows: list[Row] | None = None
    """What the call has left, where it is written already."""
    totals: dict[str, Tensor] | None = None
    """In a step that is only watched, the sums of the outputs: by them a replay is known to be the same."""
    computed: frozenset[str] = frozenset()
    """The paths of the arguments that were computed with a graph."""
    backward_from: int = 0
    cut_off: bool = False
    number_in_step: tuple[int, int] = (-1, 0)
    """A count of the run's steps, and the number of this call among those of its module since the batch came."""
    thread: int = field(default_factory=threading.get_ident)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    trouble: str | None = None
    over: bool = False
    """Whether the pass is over: the graph may live on, and more gradients may arrive."""
    alive: weakref.ref[Alive] | None = None

    @property
    def lines(self) -> tuple[SourceLine, ...]:
        """The user's frames that led to the call, the innermost last."""
        return lines_of(self.callers)

    @property
    def root(self) -> Root:
        """The root whose call this is, or is a part of."""
        return self.entry.root

    def gradient_arrived(self, path: str, gradient: Tensor) -> None:
        """Keep a gradient that has arrived at an output."""
        if self.over:
            return
        if path in self.gradients:
            self.trouble = "the loss was differentiated more than once"
        elif gradient.numel() * gradient.element_size() > MOST_GRADIENT_BYTES:
            self.trouble = f"the gradient of output {path} has more than {MOST_GRADIENT_BYTES // 2**20} MiB"
        else:
            with quiet():
                self.gradients[path] = gradient.detach()

    @property
    def was_reached(self) -> bool:
        """Whether a backward pass has come by."""
        return bool(self.gradients) or self.trouble is not None

    @property
    def can_be_reached(self) -> bool:
        """Whether the graph of the outputs still is."""
        return self.alive is None or self.alive() is not None

    @property
    def changed(self) -> str | None:
        """What has been changed since the call, in words."""
        if any(tensor._version != version for tensor, version in self.versions):
            return "weights or arguments were changed in place after the forward began"
        if self.module.__dict__.get("forward") is not self.forward:
            return "the module's forward was replaced after the call"
        return None


class _Copy:
    """A copy of a large buffer, good as long as that has its memory and its version.

    The buffer is known by its memory, since ``swap_tensors`` refuses a tensor to which there is a weak reference.
    """

    __slots__ = ("_memory", "_version", "values")

    def __init__(self, buffer: Tensor) -> None:
        self._memory = StorageWeakRef(buffer.untyped_storage())  # type: ignore[no-untyped-call]
        self._version = buffer._version
        self.values = buffer.detach().clone()

    def is_of(self, buffer: Tensor) -> bool:
        """Whether the buffer is still as it was copied."""
        is_same = self._memory.cdata == buffer.untyped_storage()._cdata  # nobody else's as long as it is referred to
        return is_same and self._version == buffer._version


class Keeper:
    """Keeps the root calls of the pass in flight; ``drop`` lets them go."""

    def __init__(self, on_kept: Callable[[Kept], None] = lambda kept: None) -> None:
        self._calls: list[Kept] = []
        self._training: set[int] = set()
        self.obstacle: str | None = None
        """Why no call is ever kept, if that is so."""
        self._on_kept = on_kept
        self.dropped = 0
        self.refused: str | None = None
        """Why a call of the pass in flight was not kept."""
        self._modules: weakref.WeakKeyDictionary[Root, tuple[int, list[weakref.ref[nn.Module]]]]
        self._modules = weakref.WeakKeyDictionary()
        self._copies: weakref.WeakKeyDictionary[Root, dict[int, _Copy]] = weakref.WeakKeyDictionary()

    @property
    def calls(self) -> list[Kept]:
        """The calls that a pass of this thread may come by: not those of another thread that trains by itself."""
        here = threading.get_ident()
        return [kept for kept in self._calls if kept.thread == here or kept.thread not in self._training]

    @property
    def roots_elsewhere(self) -> set[Root]:
        """The roots that only another thread is training at the moment."""
        mine = self.calls
        others = {kept.root for kept in self._calls if not any(kept is own for own in mine)}
        return others - {kept.root for kept in mine}

    def call_begins(
        self,
        entry: ModuleEntry,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: int,
    ) -> Kept | None:
        """Keep what is gone once the call has run; ``known`` is the number of modules that have a name so far."""
        self._let_go_of_given_up()
        if len(self._calls) >= MOST_CALLS:
            self.dropped += 1
            return None
        modules = self._modules_of(entry.root, known)
        with quiet():
            try:
                kept_args, kept_kwargs = _aliases(args), _aliases(kwargs)
                found = tensors_in_arguments(kept_args, kept_kwargs)
            except Exception as error:  # containers may be of the user's own making
                let_pass(error)
                self.refused = f"{type(error).__name__} while looking into an argument of the model"
                return None
            kept = Kept(
                entry,
                module,
                kept_args,
                kept_kwargs,
                _versions(modules, found),
                Rng.now(quickly=True),
                tuple(_autocast_state()),
                [(m, m.training) for m in modules],
                self._copies_of_buffers(entry.root, modules),
                [(part, dict(part)) for m in modules for part in (m._parameters, m._buffers)],
                module.__dict__.get("forward"),
                callers(),
                _active_reducer(),
                computed=frozenset(path for path, value in tensors_in_arguments(args, kwargs) if is_computed(value)),
            )
        self._calls.append(kept)
        self._on_kept(kept)
        return kept

    def forget(self, kept: Kept) -> None:
        """Let go of one call: it raised, or nothing can flow back into it."""
        self._calls = [other for other in self._calls if other is not kept]

    def returned(self, kept: Kept, position: int, *, has_graph: bool) -> Alive | None:
        """Note that a call has returned; its graph is to hold what comes back."""
        kept.rows_to = position
        if not has_graph:
            self.forget(kept)
            return None
        alive = Alive(kept)
        kept.alive = weakref.ref(alive)
        return alive

    def backward_begins(self, position: int) -> None:
        """A pass begins in this thread; the rows from ``position`` on are its."""
        self._training.add(threading.get_ident())
        for kept in self.calls:
            if not kept.was_reached:
                kept.backward_from = position

    def pass_fails(self) -> None:
        """The pass in flight has ended before its time."""
        for kept in self.calls:
            kept.cut_off = True

    def pass_ended(self) -> None:
        """Let go of the calls that a pass has been through; one that waits for a later pass (a GAN's) stays."""
        self._let_go([kept for kept in self.calls if kept.was_reached or not kept.can_be_reached])
        self.dropped, self.refused = 0, None

    def step_ends(self, rows: RowBuffer) -> None:
        """Let go of all calls, but for those that may wait for the pass of another optimizer, with their rows."""
        self.pass_ended()
        for kept in self.calls:
            if kept.rows is None:
                kept.rows = rows.between(kept.rows_from, kept.rows_to)
            else:
                self.forget(kept)

    def drop(self) -> None:
        """Let go of all calls."""
        self._let_go(self._calls)
        self.dropped, self.refused = 0, None

    def _let_go(self, calls: Sequence[Kept]) -> None:
        for kept in calls:
            kept.over = True
            kept.gradients.clear()
        gone = set(map(id, calls))
        self._calls = [kept for kept in self._calls if id(kept) not in gone]

    def _let_go_of_given_up(self) -> None:
        """Let go of calls, such as those of an evaluation in grad mode, through which no pass will go any more.

        The last ones stay: on an accelerator it is known later that what they returned was not finite.
        """
        given_up = [kept for kept in self.calls if not (kept.was_reached or kept.can_be_reached)]
        for kept in given_up[:-_GIVEN_UP]:
            self.forget(kept)

    def _modules_of(self, root: Root, known: int) -> list[nn.Module]:
        """Return all modules of a root; they are looked up anew when modules have been named since."""
        cached = self._modules.get(root)
        if cached is None or cached[0] != known:
            top = root.ref()
            found = [] if top is None else [module for _, module in walk(top)]
            cached = self._modules[root] = known, [weakref.ref(module) for module in found]
        return [module for reference in cached[1] if (module := reference()) is not None]

    def _copies_of_buffers(self, root: Root, modules: Iterable[nn.Module]) -> dict[int, Tensor]:
        copies: dict[int, Tensor] = {}
        known, large = self._copies.get(root, {}), {}
        for module in modules:
            for buffer in module._buffers.values():
                key = id(buffer)
                if buffer is None or key in copies or nn.parameter.is_lazy(buffer):
                    continue
                if buffer.numel() <= _ALWAYS_COPIED or buffer.is_inference():
                    copies[key] = buffer.detach().clone()
                    continue
                copy = known.get(key)
                large[key] = copy = copy if copy is not None and copy.is_of(buffer) else _Copy(buffer)
                copies[key] = copy.values
        self._copies[root] = large
        return copies


def _active_reducer() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is running, unless it will not reduce (``no_sync``)."""
    found: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return found if found is not None and found.require_backward_grad_sync else None


def _aliases(value: Any) -> Any:
    """Return the same arguments with an alias of each tensor, as ``tree_map`` does it.

    That one leaves a cycle of a function and its own closure behind at each call, which only the garbage collector
    takes away.
    """
    kind = SUPPORTED_NODES.get(_get_node_type(value))
    if kind is None:
        return _alias(value)
    parts, context = kind.flatten_fn(value)
    return kind.unflatten_fn([_aliases(part) for part in parts], context)


def _alias(value: Any) -> Any:
    """Return a tensor without its history; it shares values and version with the original."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    alias = value.detach().requires_grad_(value.requires_grad)
    return alias if type(alias) is type(value) else alias.as_subclass(type(value))


def _versions(modules: Iterable[nn.Module], found: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, int]]:
    tensors = [tensor for _, tensor in found]
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    tensors += [p for p in parameters if not nn.parameter.is_lazy(p)]
    try:
        return [(tensor, tensor._version) for tensor in tensors]
    except RuntimeError as error:  # an inference tensor has no version
        let_pass(error)
        return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _autocast_state() -> Iterable[Autocast]:
    for device in _DEVICES_OF_AUTOCAST:
        if device == "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            yield device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def callers() -> Callers:
    """Return code and line of the frames above, outermost first."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(frames))


def lines_of(frames: Callers) -> tuple[SourceLine, ...]:
    """Return the user's frames among these; those outside of the script that is being recorded are left out."""
    runner = max((index for index, (code, _) in enumerate(frames) if code.co_filename == RUNNER), default=-1)
    return tuple(line_of(code, number) for code, number in frames[runner + 1 :] if is_users(code))
