"""What differs between two runs besides their records: command, versions, configuration, modules. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from gradtrace.analysis.compare.parts import Change, ChangeKind
from gradtrace.analysis.labels import names_above
from gradtrace.trace.runinfo import ModuleInfo, RunInfo

Modules = dict[str, ModuleInfo]
_Shape = tuple[tuple[str, str, frozenset[tuple[str, str]]], ...]


def changes(a: Sequence[RunInfo], b: Sequence[RunInfo]) -> tuple[Change, ...]:
    """Return what differs between the facts of two runs, each given as those of its ranks."""
    one, other = a[0], b[0]
    return (
        *_command(one.command, other.command),
        *_values("version", _versions(one), _versions(other)),
        *_values("config", one.config, other.config),
        *module_changes(modules_of(a), modules_of(b)),
    )


def modules_of(infos: Iterable[RunInfo]) -> Modules:
    """Return the modules of all ranks in model order, by name."""
    modules: Modules = {}
    for info in infos:
        for module in info.modules:
            modules.setdefault(module.name, module)
    return modules


def module_changes(a: Modules, b: Modules) -> Iterator[Change]:
    """Yield what differs between two module tables: types, parameter shapes, and names that only one of them has.

    A module that is gone and a new one that is the same from top to bottom, in types and shapes, are one renamed. Of
    modules that are gone or new or renamed together with the one above them, that one alone is named.
    """
    both = [name for name in a if name in b]
    for name in both:
        if a[name].type != b[name].type:
            yield Change("module_type", name, a[name].type, b[name].type)
    for name in both:
        if a[name].parameters != b[name].parameters:
            yield from _shapes(name, a[name].parameters, b[name].parameters)
    added = _from_top_to_bottom(b, _topmost(b, a))
    alike: dict[_Shape, deque[str]] = {}
    for name, shape in added.items():
        alike.setdefault(shape, deque()).append(name)
    for old, shape in _from_top_to_bottom(a, _topmost(a, b)).items():
        if not alike.get(shape):
            yield Change("module_removed", old, a=a[old].type)
            continue
        new = alike[shape].popleft()
        del added[new]
        yield Change("module_renamed", old, a=old, b=new)
    yield from (Change("module_added", name, b=b[name].type) for name in added)


def _versions(info: RunInfo) -> dict[str, Any]:
    return info.versions | {"gradtrace": info.gradtrace_version}


def _values(kind: ChangeKind, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Change]:
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name):
            yield Change(kind, name, a.get(name), b.get(name))


def _command(a: list[str], b: list[str]) -> Iterator[Change]:
    """Yield the stretches of two command lines that differ, each behind the option that it belongs to."""
    for what, start_a, end_a, start_b, end_b in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if what == "equal":
            continue
        if start_a and a[start_a - 1].startswith("-") and _is_value(a, start_a, end_a) and _is_value(b, start_b, end_b):
            start_a, start_b = start_a - 1, start_b - 1
        yield Change("command", "", " ".join(a[start_a:end_a]) or None, " ".join(b[start_b:end_b]) or None)


def _is_value(words: list[str], start: int, end: int) -> bool:
    """Whether a stretch begins with what may be an option's value; an empty one may be a value left out."""
    return start == end or not words[start].startswith("-")


def _shapes(name: str, a: dict[str, str], b: dict[str, str]) -> Iterator[Change]:
    for path in dict.fromkeys((*a, *b)):
        if a.get(path) != b.get(path):
            yield Change("module_parameters", f"{name}.{path}" if name else path, a.get(path), b.get(path))


def _topmost(modules: Modules, others: Modules) -> list[str]:
    """Return the modules that the others lack, without those that lie below one of them."""
    alone = [name for name in modules if name not in others]
    there = set(alone)
    return [name for name in alone if not any(above and above in there for above in names_above(name))]


def _from_top_to_bottom(modules: Modules, tops: Iterable[str]) -> dict[str, _Shape]:
    """Return for each of ``tops`` itself and what lies below it: names from there on, types and parameter shapes."""
    found: dict[str, list[tuple[str, str, frozenset[tuple[str, str]]]]] = {top: [] for top in tops}
    for name, module in modules.items():
        top = next((one for one in (name, *filter(None, names_above(name))) if one in found), None)
        if top is not None:
            found[top].append((name[len(top) :], module.type, frozenset(module.parameters.items())))
    return {top: tuple(shape) for top, shape in found.items()}
