"""Fully-qualified names of modules, parameters and buffers, as in state_dict.

Wrappers (DistributedDataParallel, DataParallel, FSDP, torch.compile, checkpoint wrappers) add no part to a
name. A shared module or parameter goes by the first name under which it is found. Which name the root itself
gets is known only when the step has shown how many roots there are, so names are asked for late.
"""

from __future__ import annotations

import fnmatch
import inspect
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from gradtrace.capture.held import Listed, TensorEntry
from gradtrace.capture.sites import SitesOfModule
from gradtrace.capture.subclasses import note
from gradtrace.trace.runinfo import ModuleInfo

_WRAPPED_AS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers of torch."""
    while (child := _wrapped_child(module)) is not None:
        module = child
    return module


def is_wrapper(module: nn.Module) -> bool:
    """Whether the module is one of torch's wrappers, which have no name of their own."""
    return _wrapped_child(module) is not None


def _wrapped_child(module: nn.Module) -> nn.Module | None:
    attribute = _WRAPPED_AS.get(type(module).__name__)
    if attribute is None or not type(module).__module__.startswith("torch."):
        return None
    child = module._modules.get(attribute)
    return child if isinstance(child, nn.Module) else None


class Root:
    """An outermost module with all that lies below it. ``label`` names it where a run has several.

    ``wanted`` is the label that was asked for; another root may have had it before.
    """

    def __init__(self, module: nn.Module, label: str, wanted: str) -> None:
        self.label = label
        self.wanted = wanted
        self.prefix: str | None = None
        kind = type(module)
        self.kind, self.type_name = weakref.ref(kind), f"{kind.__module__}.{kind.__qualname__}"
        self.ref = weakref.ref(module)
        self._owns_parameters = next(module.parameters(), None) is not None
        self.entries: dict[tuple[str, bool], ModuleEntry] = {}

    @property
    def name(self) -> str:
        """The root's own name, '' where it is the only one that owns parameters."""
        return self.label if self.prefix is None else self.prefix

    @property
    def owns_parameters(self) -> bool:
        """Whether it has, or has had, a parameter: some make theirs in the first call."""
        module = self.ref()
        if not self._owns_parameters and module is not None:
            self._owns_parameters = next(module.parameters(), None) is not None
        return self._owns_parameters


class ModuleEntry:
    """A module that has been given a name, and whether it is to be recorded."""

    __slots__ = ("calls", "info", "is_root", "key", "local", "ref", "root", "selected", "sites", "transparent")

    def __init__(self, module: nn.Module, root: Root, local: str, selected: bool) -> None:
        self.root = root
        self.local = local
        self.selected = selected
        self.is_root = local == ""
        self.transparent = is_wrapper(module)
        self.calls = 0
        self.sites = SitesOfModule(self)
        self.point_to(module)

    def point_to(self, module: nn.Module) -> None:
        """Stand for ``module``, which may have taken the place of another one."""
        self.key = id(module)
        self.ref = weakref.ref(module)
        self.info = _describe(module)

    @property
    def name(self) -> str:
        """What the column ``module`` holds."""
        return _join(self.root.name, self.local)


class Names:
    """All roots of a run, and the names of everything below them."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self.roots: list[Root] = []
        self._include = tuple(include)
        self._exclude = tuple(exclude)
        self._modules: dict[int, ModuleEntry] = {}
        self._parameters: dict[int, TensorEntry] = {}
        self._history: list[ModuleEntry] = []
        self._living: dict[ModuleEntry, ModuleEntry] = {}
        self._labels: set[str] = set()
        self._same: Counter[str] = Counter()
        self._an_owner_is_gone = False
        self._frozen = False
        self._listed: Listed | None = None

    def entry(self, module: nn.Module) -> ModuleEntry | None:
        """Return the module's entry, or None for a module that lies below no known root."""
        entry = self._modules.get(id(module))
        return entry if entry is not None and entry.ref() is module else None

    def parameter(self, tensor: Tensor) -> TensorEntry | None:
        """Return a parameter's entry, or None for a tensor that no known root owns."""
        entry = self._parameters.get(id(tensor))
        return entry if entry is not None and entry.ref() is tensor else None

    def add_root(self, module: nn.Module, label: str) -> Root:
        """Name ``module`` and everything below it. ``label`` is made unique among the roots."""
        self._forget_the_dead()
        root = Root(module, self._unique(label), label)
        self.roots.append(root)
        if self._frozen:
            root.prefix = self._prefix(root)
        self.refresh(root)
        return root

    def _unique(self, label: str) -> str:
        unique = label
        while unique in self._labels:
            self._same[label] += 1
            unique = f"{label}_{self._same[label] + 1}"
        self._labels.add(unique)
        return unique

    def revive(self, module: nn.Module, label: str) -> bool:
        """Let ``module`` take the place of a root of its kind and label that is no more; say whether there was one.

        A criterion that is made anew in each step is one root, not a thousand.
        """
        for root in self.roots:
            if root.ref() is None and root.kind() is type(module) and root.wanted == label:
                root.ref = weakref.ref(module)
                if len(root.entries) > 1 or root.owns_parameters:
                    self._forget_the_dead()
                self.refresh(root)
                return True
        return False

    def _forget_the_dead(self) -> None:
        """Let go of what is of no use once a module or parameter is gone: a run may train many models in a row."""
        self._parameters = {k: e for k, e in list(self._parameters.items()) if e.ref() is not None}
        for entry in list(self._living):
            if entry.ref() is None:
                entry.sites.clear()
                del self._living[entry]

    def forget_the_gone(self) -> None:
        """Let go of the roots whose place no other can take: their class, made for them alone, is no more either."""
        gone = [root for root in self.roots if root.ref() is None and root.kind() is None]
        if gone:
            self.roots = [root for root in self.roots if root not in gone]
            self._an_owner_is_gone = self._an_owner_is_gone or any(root.owns_parameters for root in gone)

    def refresh(self, root: Root) -> None:
        """Name what has been added below ``root`` since it was named."""
        self._listed = None
        top = root.ref()
        if top is None:
            return
        for local, module in walk(top):
            entry = self.entry(module) or self._name(module, root, local)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                note(type(tensor))
            for name, parameter in module._parameters.items():
                if parameter is not None and self.parameter(parameter) is None:
                    self._parameters[id(parameter)] = TensorEntry(parameter, entry, name, "param")

    def _name(self, module: nn.Module, root: Root, local: str) -> ModuleEntry:
        place = (local, is_wrapper(module))
        entry = root.entries.get(place)
        if entry is None:
            entry = root.entries[place] = ModuleEntry(module, root, local, self._selected(root, local))
            self._history.append(entry)
        else:
            if self._modules.get(entry.key) is entry:
                del self._modules[entry.key]
            entry.point_to(module)
        self._modules[id(module)] = self._living[entry] = entry
        return entry

    def freeze(self) -> None:
        """Decide the prefixes: the only root that owns parameters goes without one."""
        if self._frozen:
            return
        owners = [root for root in self.roots if root.owns_parameters]
        if not owners:
            return
        self._frozen = True
        for root in self.roots:
            root.prefix = "" if owners == [root] else root.label

    def _prefix(self, root: Root) -> str:
        others = (other for other in self.roots if other is not root)
        only = root.owns_parameters and not (self._an_owner_is_gone or any(r.owns_parameters for r in others))
        return "" if only else root.label

    def tensors(self) -> list[tuple[TensorEntry, Tensor]]:
        """Return every parameter and floating buffer of the living roots that is to be recorded, in order."""
        pairs = None if self._listed is None else self._listed.pairs()
        if pairs is None:
            modules = [module for root in self.roots if (top := root.ref()) is not None for _, module in walk(top)]
            pairs = list(self._tensors_of(modules))
            self._listed = Listed(modules, pairs)
        return pairs

    def _tensors_of(self, modules: list[nn.Module]) -> Iterator[tuple[TensorEntry, Tensor]]:
        seen: set[int] = set()
        for module in modules:
            entry = self.entry(module)
            if entry is None or not entry.selected:
                continue
            for pair in self._own_tensors(module, entry):
                if id(pair[1]) not in seen:
                    seen.add(id(pair[1]))
                    yield pair

    def _own_tensors(self, module: nn.Module, entry: ModuleEntry) -> Iterator[tuple[TensorEntry, Tensor]]:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                known = self.parameter(parameter)
                yield known or TensorEntry(parameter, entry, name, "param"), parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and (buffer.is_floating_point() or buffer.is_complex()):
                yield TensorEntry(buffer, entry, name, "buffer"), buffer

    @property
    def count(self) -> int:
        """How many modules have been named."""
        return len(self._history)

    def all_modules(self) -> list[ModuleEntry]:
        """Return every module that has been named."""
        return list(self._history)

    def module_table(self) -> list[ModuleInfo]:
        """Return the view ``modules``: every module that was named, in model order."""
        table = []
        for entry in self._history:
            if entry.transparent:
                continue
            module, info = entry.ref(), entry.info
            if module is not None:
                info.parameters = _shapes(module)  # those of a lazy module are known after its first call
            info.name, info.root, info.calls = entry.name, entry.is_root, entry.calls
            info.depth = 0 if entry.is_root else entry.local.count(".") + 1
            table.append(info)
        return table

    def unmatched_patterns(self) -> list[str]:
        """Return the include and exclude patterns that match no module's name."""
        patterns = (*self._include, *self._exclude)
        return [p for p in patterns if not any(_matches(p, e.root, e.local) for e in self._history)]

    def _selected(self, root: Root, local: str) -> bool:
        included = not self._include or any(_matches(p, root, local) for p in self._include)
        return included and not any(_matches(p, root, local) for p in self._exclude)


def _matches(pattern: str, root: Root, local: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (local, _join(root.label, local)))


def _join(prefix: str, local: str) -> str:
    return f"{prefix}.{local}" if prefix and local else prefix or local


def walk(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below ``top`` once, with its name; wrappers and what they wrap share a name."""
    seen: set[int] = set()
    stack = [("", top)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        is_wrapper = _wrapped_child(module) is not None
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        for key, child in reversed(children):
            stack.append((name if is_wrapper else _join(name, key), child))


def _describe(module: nn.Module) -> ModuleInfo:
    file, line = _source_of(type(module))
    return ModuleInfo(name="", type=type(module).__name__, file=file, line=line, parameters=_shapes(module))


def _shapes(module: nn.Module) -> dict[str, str]:
    return {
        name: str(list(parameter.shape))
        for name, parameter in module._parameters.items()
        if parameter is not None and not nn.parameter.is_lazy(parameter)
    }


# A class may be made for one model only, and what its methods hold is to go with it.
_SOURCES: weakref.WeakKeyDictionary[type, tuple[str | None, int | None]] = weakref.WeakKeyDictionary()


def _source_of(kind: type) -> tuple[str | None, int | None]:
    """Return file and first line of the class's ``forward``, from its code object: no file is read.

    None where there is no such code: of a scripted module, and of ModuleList and the like, which are never called.
    """
    if kind not in _SOURCES:
        # Asking a scripted module for it raises.
        forward = getattr(kind, "forward", None)
        code = getattr(inspect.unwrap(forward), "__code__", None)  # type: ignore[arg-type]
        if forward is nn.Module.forward:
            code = None
        _SOURCES[kind] = (code.co_filename, code.co_firstlineno) if code else (None, None)
    return _SOURCES[kind]
