"""How a step that was captured in full becomes one that was only watched. Pure: a table in, a table out.

A thinned step keeps its losses, learning rates, loss scales, events, the outputs of outermost modules, everything
non-finite and the state that a run starts with; of its gradients one row stays for each backward pass, their norm.
A step of which even that is too much keeps losses, events and start state. Rows that stay, stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute

from gradtrace.trace.arrow import ARROW_SCHEMA, batch_of_records
from gradtrace.trace.schema import Record

pc: Any = pyarrow.compute  # Its stubs refuse a Python value where the functions take one.

_Mask: TypeAlias = Any
"""An Arrow array of booleans, one a row."""

_LEAST = ("loss",)
WATCHED = ("loss", "lr", "loss_scale", "grad_norm")
"""Tensors of which a watched step has rows though they are finite."""
TELLING_EVENTS = ("incident", "replay", "stop")
"""Events of a step that explains a failure."""


class Plan(NamedTuple):
    """What stays of older steps: each ``full``-th in full, and of the others each ``watched``-th as a watched one.

    Both are powers of two and count by the number of the step; 1 is all of them.
    """

    full: int = 1
    watched: int = 1


class Contents(NamedTuple):
    """What a table holds: its first and last step, the steps captured in full, and those that explain a failure."""

    first_step: int
    last_step: int
    full: list[int]
    telling: list[int]


def contents(table: pa.Table) -> Contents:
    """Return what a table of at least one row holds."""
    tensor, events = _words(table, "tensor"), pc.equal(_words(table, "phase"), "event")
    steps = table["step"]
    telling = pc.or_(pc.is_valid(table["op"]), pc.and_(events, _among(tensor, TELLING_EVENTS)))
    watched = set(_steps(table, pc.equal(tensor, "grad_norm")))
    full = [step for step in sorted(pc.unique(steps).to_pylist()) if step not in watched]
    bounds = pc.min_max(steps).as_py()
    return Contents(bounds["min"], bounds["max"], full, _steps(table, telling))


def thinned(
    table: pa.Table, plan: Plan, roots: Collection[str], is_kept: Callable[[int], bool] = lambda step: False
) -> pa.Table:
    """Return the rows that ``plan`` keeps, in the order of ``seq``.

    ``roots`` are the names of outermost modules. Steps of which ``is_kept`` is true stay in full.
    """
    table = table.combine_chunks().unify_dictionaries()
    steps: list[int] = pc.unique(table["step"]).to_pylist()
    full = _of_steps(table, [step for step in steps if step % plan.full == 0 or is_kept(step)])
    bare = pc.and_not(_of_steps(table, [step for step in steps if step % plan.watched]), full)
    stays = pc.if_else(bare, _stays_of_least(table), _stays_of_watched(table, roots))
    gone = pc.invert(pc.or_(full, stays))
    norms = _gradient_norms(table, pc.invert(pc.or_(full, bare)), gone)
    rest = table.filter(pc.invert(gone))
    if not norms:
        return rest
    added = pa.Table.from_batches([batch_of_records(norms)])
    return pa.concat_tables([rest, added]).unify_dictionaries().sort_by("seq")


def _stays_of_least(table: pa.Table) -> _Mask:
    """Return which rows stay of a step of which hardly anything does."""
    phase, tensor = _words(table, "phase"), _words(table, "tensor")
    start = pc.and_(pc.equal(phase, "input"), _among(tensor, ("param", "buffer")))
    of_boundary = pc.and_(_among(tensor, _LEAST), pc.is_null(table["op"]))
    return pc.or_(pc.or_(of_boundary, start), pc.equal(phase, "event"))


def _stays_of_watched(table: pa.Table, roots: Collection[str]) -> _Mask:
    """Return which rows stay of a step that becomes a watched one."""
    tensor, boundary = _words(table, "tensor"), pc.is_null(table["op"])
    scalar = pc.and_(_among(tensor, WATCHED), boundary)
    of_root = pc.and_(pc.equal(tensor, "output"), _among(_words(table, "module"), roots))
    masks = (_nonfinite(table), scalar, pc.and_(of_root, boundary))
    stays = _stays_of_least(table)
    for mask in masks:
        stays = pc.or_(stays, mask)
    return stays


def _gradient_norms(table: pa.Table, in_question: _Mask, gone: _Mask) -> list[Record]:
    """Return a row for the gradients of each backward pass of the steps in question.

    It takes the place of the last row that goes: seq is to stay sorted, and no number may come twice.
    """
    tensor = _words(table, "tensor")
    has_one = _of_steps(table, _steps(table, pc.equal(tensor, "grad_norm")))
    arrived = pc.and_(pc.equal(tensor, "grad"), pc.equal(_words(table, "phase"), "backward"))
    boundary = pc.is_null(table["op"])
    chosen = pc.and_(pc.and_(arrived, boundary), pc.and_not(in_question, has_one))
    losses = pc.and_(pc.equal(tensor, "loss"), boundary)
    columns = {name: table[name] for name in ("step", "micro_step", "seq", "rank", "time", "norm")}
    columns["loss"] = pc.cumulative_sum(losses.cast(pa.int64()))  # several backward passes may share a micro step
    columns["nan"] = _positive(table, "nan_count")
    columns["inf"] = pc.or_(_positive(table, "posinf_count"), _positive(table, "neginf_count"))
    columns["place"] = pc.if_else(gone, table["seq"], pa.scalar(None, pa.int64()))
    passes = (
        pa.table(columns)
        .filter(chosen)
        .group_by(["step", "micro_step", "loss", "rank", "time"], use_threads=False)
        .aggregate([("norm", "list"), ("nan", "any"), ("inf", "any"), ("place", "max"), ("seq", "max")])
        .sort_by("seq_max")
    )
    taken: set[int] = set()
    rows = (_norm_row(table, gone, one, taken) for one in passes.to_pylist())
    return [row for row in rows if row is not None]


def _norm_row(table: pa.Table, gone: _Mask, one: dict[str, Any], taken: set[int]) -> Record | None:
    seq = one["place_max"]
    if seq is None or seq in taken:  # every gradient of the pass stays, being non-finite
        free = pc.filter(table["seq"], pc.and_(gone, pc.equal(table["step"], one["step"]))).to_pylist()
        seq = _nearest((number for number in free if number not in taken), one["seq_max"])
    if seq is None:
        return None
    taken.add(seq)
    norm: float | None = math.hypot(*(value for value in one["norm_list"] if value is not None))
    nan, inf = int(one["nan_any"]), int(not one["nan_any"] and (one["inf_any"] or norm == math.inf))
    norm = None if nan or inf else norm
    return Record(
        one["step"], seq, "backward", "grad_norm", micro_step=one["micro_step"], rank=one["rank"], time=one["time"],
        dtype="float64", shape="[]", device="cpu", numel=1, nan_count=nan, posinf_count=inf, neginf_count=0,
        min=norm, max=norm, norm=norm,
    )  # fmt: skip


def _nearest(free: Iterable[int], seq: int) -> int | None:
    """Return the first number after ``seq``, without one the last before."""
    return min(free, key=lambda number: (number < seq, abs(number - seq)), default=None)


def _nonfinite(table: pa.Table) -> _Mask:
    one, two, three = (_positive(table, name) for name in ("nan_count", "posinf_count", "neginf_count"))
    return pc.or_(pc.or_(one, two), three)


def _positive(table: pa.Table, name: str) -> _Mask:
    return pc.fill_null(pc.greater(table[name], 0), False)


def _words(table: pa.Table, name: str) -> Any:
    return table[name].cast(ARROW_SCHEMA.field(name).type.value_type)


def _among(words: Any, wanted: Iterable[str]) -> _Mask:
    return pc.is_in(words, value_set=pa.array(list(wanted), pa.string()))


def _of_steps(table: pa.Table, steps: list[int]) -> _Mask:
    return pc.is_in(table["step"], value_set=pa.array(steps, pa.int64()))


def _steps(table: pa.Table, mask: _Mask) -> list[int]:
    return sorted(pc.unique(table["step"].filter(mask)).to_pylist())
