"""Two runs of literal rows side by side: what is the first difference, what is none, what is only in one of them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from gradtrace.analysis.compare.compare import compare
from gradtrace.analysis.compare.parts import Kinds, ScalarChange, Unmatched
from gradtrace.analysis.run import open_run
from gradtrace.errors import NoMatchError, RunClosedError
from gradtrace.trace.arrow import batch_of_records
from gradtrace.trace.runinfo import ModuleInfo, RunInfo
from gradtrace.trace.writer import RunWriter
from tests.analysis.rows import ALL_NAN, MODULES, Rows, backward, forward, healthy, update
from tests.traces import write_run

A_STEP = 19
"""Boundaries of a step of ``healthy``; its learning rate is none."""


def training(steps: int = 3, changed: int | None = None, **other: dict[str, dict]) -> Rows:
    """Return healthy steps; ``other`` are changes to forward, backward and update of the step ``changed``."""
    rows = Rows()
    healthy(rows, steps if changed is None else changed)
    if changed is not None:
        forward(rows, **other.get("forward", {}))
        backward(rows, **other.get("backward", {}))
        update(rows, **other.get("update", {}))
        rows.step += 1
        healthy(rows, steps - changed - 1)
    return rows


@pytest.fixture
def differ(tmp_path):
    """Return a function that writes two runs, unless they are paths, and compares them."""

    number = itertools.count()

    def write(name, rows, info):
        if not isinstance(rows, Rows):
            return rows
        directory = tmp_path / str(next(number))
        directory.mkdir()
        return write_run(directory / name, rows.records, **({"modules": MODULES} | info))

    def differ(a, b, *, info_a=None, info_b=None, **options):
        first, second = write("a.parquet", a, info_a or {}), write("b.parquet", b, info_b or {})
        with open_run(first) as one, open_run(second) as other:
            return compare(one, other, **options)

    return differ


def where(pair):
    return (pair.a.step, pair.a.phase, pair.a.module, pair.a.tensor, pair.a.path, pair.statistic)


def test_a_run_does_not_differ_from_itself(differ):
    found = differ(training(), training())
    assert not found.found
    assert (found.first, found.modules, found.only_a, found.only_b) == (None, (), (), ())
    assert (found.compared, found.differing, found.modules_compared) == (3 * A_STEP, 0, 4)
    assert (found.overlap.steps, found.overlap.full, found.overlap.first, found.overlap.last) == (3, 3, 0, 2)


def test_the_first_difference_is_the_first_in_execution_order_not_the_largest(differ):
    other = training(
        changed=1,
        forward={"act": {"norm": 1e6}, "out": {"norm": 1e9}},
        backward={"fc1": {"norm": 1e12}},
    )
    found = differ(training(), other)
    assert where(found.first) == (1, "forward", "act", "output", "0", "norm")
    # Step 1 begins with seq 20; the batch, fc1's two and act's input are before it, and a norm is seq + 2.
    assert (found.first.a.seq, found.first.a.norm, found.first.b.norm) == (24, 26.0, 1e6)
    assert found.first.difference == pytest.approx((1e6 - 26) / 1e6)
    assert [line.module for line in found.modules] == ["fc1", "", "act"]
    assert [(line.differing, line.compared) for line in found.modules] == [(1, 15), (1, 9), (1, 12)]
    assert (found.differing, found.modules_differing) == (3, 3)


def test_a_module_has_its_first_and_its_largest_difference(differ):
    changed = training(3, 1, forward={"fc1": {"norm": 48.0}})  # a norm is seq + 2: 24
    changed.records[42] = changed.records[42]._replace(max=430.0)  # fc1's output in step 2, where max is seq + 1: 43
    changed.records[41] = changed.records[41]._replace(norm=44.0)  # its input there: 43
    (line,) = differ(training(3), changed).modules
    assert (line.module, line.type, line.differing, line.compared) == ("fc1", "Linear", 3, 15)
    assert where(line.first) == (1, "forward", "fc1", "output", "0", "norm")
    assert line.first.difference == 0.5
    assert where(line.worst) == (2, "forward", "fc1", "output", "0", "max")
    assert line.worst.difference == pytest.approx(0.9)


def test_counts_of_nan_and_inf_that_differ_are_a_difference_and_the_same_ones_are_none(differ):
    bad = {"nan_count": 3, "posinf_count": 1, "min": -1.0, "max": 1.0, "norm": 2.0}
    both = training(changed=1, forward={"act": bad})
    assert not differ(both, both).found
    for name in ("nan_count", "posinf_count", "neginf_count"):
        other = training(changed=1, forward={"act": bad | {name: 2}})
        found = differ(both, other, rtol=10.0)
        assert where(found.first) == (1, "forward", "act", "output", "0", name)
        assert found.first.difference == math.inf
        assert getattr(found.first.b, name) == 2


def test_a_tensor_without_finite_elements_equals_its_like(differ):
    nothing = {"nan_count": 8, "min": None, "max": None, "norm": None}
    rows = training(changed=1, backward={"fc1_grad": nothing})
    assert not differ(rows, rows).found
    assert where(differ(training(), rows).first) == (1, "backward", "fc1", "grad", "weight", "nan_count")


def test_the_default_tolerance_of_float32_is_half_of_its_digits(differ):
    base = training(changed=0, forward={"act": {"norm": 1.0}})

    def with_norm(norm):
        return training(changed=0, forward={"act": {"norm": norm}})

    assert not differ(base, with_norm(1 + 3.4e-4)).found
    assert differ(base, with_norm(1 + 3.6e-4)).found  # sqrt(2^-23) is 3.45e-4
    assert not differ(base, with_norm(1.1), rtol=0.1).found
    assert differ(base, with_norm(1 + 3e-4), rtol=1e-4).found
    assert differ(base, with_norm(1 + 1e-6), rtol=0.0).found
    assert not differ(base, base, rtol=0.0).found


def test_min_and_max_are_measured_against_the_larger_of_them(differ):
    base = training(changed=0, forward={"act": {"min": 1e-7, "max": 4.0}})
    assert not differ(base, training(changed=0, forward={"act": {"min": -1e-7, "max": 4.0}})).found
    found = differ(base, training(changed=0, forward={"act": {"min": -0.1, "max": 4.0}}))
    assert where(found.first) == (0, "forward", "act", "output", "0", "min")
    assert found.first.difference == pytest.approx(0.1 / 4.0, rel=1e-5)


def test_zeros_equal_zeros_whatever_their_sign(differ):
    zero = {"min": 0.0, "max": 0.0, "norm": 0.0}
    other = {"min": -0.0, "max": -0.0, "norm": 0.0}
    one, two = (training(changed=0, forward={"act": values}) for values in (zero, other))
    assert not differ(one, two, rtol=0.0).found


def test_a_gradient_that_is_rounding_alone_is_measured_against_its_module_s_others(differ):
    def with_bias(size):
        rows = training(1)
        rows.step = 1
        rows.add("backward", "fc1", "grad", "weight", min=-1.0, max=1.0, norm=3.0)
        rows.add("backward", "fc1", "grad", "bias", min=-size, max=size, norm=2 * size)
        return rows

    assert not differ(with_bias(1e-9), with_bias(3e-9)).found
    assert where(differ(with_bias(1e-9), with_bias(3e-3)).first) == (1, "backward", "fc1", "grad", "bias", "norm")


def test_a_small_output_is_measured_against_itself(differ):
    small, larger = ({"min": -size, "max": size, "norm": size} for size in (1e-9, 3e-9))
    found = differ(training(changed=0, forward={"act": small}), training(changed=0, forward={"act": larger}))
    assert where(found.first) == (0, "forward", "act", "output", "0", "norm")


def test_integers_must_be_equal_whatever_the_tolerance(differ):
    tokens = {"dtype": "int64", "norm": None, "min": 0.0, "max": 50_000.0}
    base = training(changed=1, forward={"batch": tokens})
    assert not differ(base, base).found
    other = training(changed=1, forward={"batch": tokens | {"max": 50_001.0}})
    found = differ(base, other, rtol=0.5)
    assert where(found.first) == (1, "input", "", "input", "0", "max")
    assert found.tolerances == {"float32": 0.5, "int64": 0.0}


def test_another_shape_is_a_difference_though_the_statistics_agree(differ):
    found = differ(training(), training(changed=1, forward={"act": {"shape": "[2, 4]"}}))
    assert where(found.first) == (1, "forward", "act", "output", "0", "shape")
    assert (found.first.a.shape, found.first.b.shape, found.differing) == ("[8]", "[2, 4]", 1)


def in_dtype(rows, dtype, device=None, factor=1.0):
    """Return the rows with another dtype and device, norms of all but the first row times a factor."""
    other = Rows()
    other.records = [
        row._replace(dtype=dtype, device=device, norm=row.norm * (factor if row.seq else 1.0)) for row in rows.records
    ]
    return other


def test_bfloat16_against_float32_is_said_and_judged_by_the_coarser(differ):
    found = differ(training(), in_dtype(training(), "bfloat16", factor=1.08))
    assert not found.found
    assert found.dtypes == (Kinds("float32", "bfloat16", 3 * A_STEP),)
    assert found.tolerances == {"bfloat16": math.sqrt(2**-7), "float32": math.sqrt(2**-7)}
    found = differ(training(), in_dtype(training(), "bfloat16", factor=1.12))
    assert where(found.first) == (0, "forward", "fc1", "input", "0", "norm")
    assert found.first.tolerance == pytest.approx(0.0884, abs=1e-4)


def test_rounding_of_the_coarser_type_reaches_boundaries_that_both_have_in_the_finer(differ):
    mixed = training()
    mixed.records[3] = mixed.records[3]._replace(dtype="bfloat16")
    mixed.records[5] = mixed.records[5]._replace(norm=mixed.records[5].norm * 1.05)  # float32 in both
    found = differ(training(), mixed)
    assert not found.found
    assert found.dtypes == (Kinds("float32", "bfloat16", 1),)


def test_in_two_runs_of_the_same_mixed_types_each_has_its_own_tolerance(differ):
    def mixed(factor):
        rows = training()
        rows.records[3] = rows.records[3]._replace(dtype="bfloat16")
        rows.records[5] = rows.records[5]._replace(norm=rows.records[5].norm * factor)
        return rows

    found = differ(mixed(1.0), mixed(1.05))
    assert (found.first.a.seq, found.first.tolerance) == (5, math.sqrt(2**-23))


def test_other_devices_are_said_and_are_no_difference(differ):
    found = differ(in_dtype(training(), "float32", "cpu"), in_dtype(training(), "float32", "cuda:0"))
    assert not found.found
    assert found.devices == (Kinds("cpu", "cuda:0", 3 * A_STEP),)
    assert found.dtypes == ()


def test_runs_of_different_length_are_compared_in_the_steps_that_both_have(differ):
    found = differ(training(5), training(3))
    assert not found.found
    assert (found.compared, found.overlap.steps, found.overlap.only_a, found.overlap.only_b) == (3 * A_STEP, 3, 2, 0)


def test_steps_limit_the_comparison(differ):
    other = training(4, 1, forward={"act": {"norm": 1e6}})
    found = differ(training(4), other, steps=(2, None))
    assert (found.found, found.compared, found.overlap.first, found.overlap.only_a) == (False, 2 * A_STEP, 2, 0)
    assert differ(training(4), other, steps=(None, 2)).first.a.step == 1


def test_a_learning_rate_that_differs_is_named_and_is_not_the_first_boundary(differ):
    def with_lr(lr, norm):
        rows = Rows()
        for _ in range(2):
            forward(rows)
            backward(rows)
            update(rows, lr=lr, fc1={"norm": norm})
            rows.step += 1
        return rows

    found = differ(with_lr(0.1, 1.0), with_lr(0.2, 1.1))
    assert found.scalars == (ScalarChange("lr", "0.0", 0, 0, 0.1, 0.2, 2),)
    assert where(found.first) == (0, "optimizer", "fc1", "param", "weight", "norm")
    unseen = differ(with_lr(0.1, 1.0), with_lr(0.2, 1.0))
    assert unseen.first is None
    assert unseen.found


def test_a_learning_rate_that_is_nan_in_both_is_no_difference_and_in_one_is(differ):
    def with_lr(lr):
        rows = Rows()
        forward(rows)
        backward(rows)
        update(rows, lr=lr, lr_counts={} if lr else {"nan_count": 1})
        return rows

    assert not differ(with_lr(None), with_lr(None)).found
    (scalar,) = differ(with_lr(0.1), with_lr(None)).scalars
    assert scalar.a == 0.1
    assert math.isnan(scalar.b)


def test_what_only_one_run_has_is_counted_by_module_and_is_no_numeric_difference(differ):
    longer = training(1)
    longer.step = 1
    forward(longer)
    longer.add("forward", "ema", "output")
    longer.add("forward", "ema", "output", "1")
    shorter = training(1)
    shorter.step = 1
    forward(shorter)
    found = differ(longer, shorter)
    assert (found.first, found.only_b) == (None, ())
    assert found.only_a == (Unmatched("ema", 2, 1),)
    assert found.found
    assert differ(shorter, longer).only_b == (Unmatched("ema", 2, 1),)


def watched(rows, grad_norm=3.0):
    """Add a step that was only watched."""
    rows.add("forward", "", "output")
    rows.scalar("loss", "loss", 1.0)
    rows.scalar("backward", "grad_norm", grad_norm)
    rows.scalar("optimizer", "lr", 0.1, "0.0")
    rows.step += 1


def test_a_watched_step_lacks_rows_without_that_being_a_difference(differ):
    full, thin = Rows(), Rows()
    for rows in (full, thin):
        healthy(rows, 1)
    out, loss = {"min": -1.0, "max": 1.0, "norm": 2.0}, 1.0
    forward(full, out=out)
    backward(full, loss=loss, fc1_grad=ALL_NAN)
    update(full)
    thin.add("forward", "", "output", **out)
    thin.scalar("loss", "loss", loss)
    thin.add("backward", "fc1", "grad", "weight", **ALL_NAN)  # kept, because it is not finite
    thin.scalar("backward", "grad_norm", None, nan_count=1)
    for a, b in ((full, thin), (thin, full)):
        found = differ(a, b)
        assert not found.found
        assert found.compared == A_STEP + 3  # the output, the loss and a gradient of the second step
        assert (found.overlap.steps, found.overlap.full) == (2, 1)


def test_the_gradient_norms_of_watched_steps_are_compared(differ):
    one, other = Rows(), Rows()
    for rows in (one, other):
        watched(rows)
    watched(one, 3.0)
    watched(other, 3.5)
    assert where(differ(one, other).first) == (1, "backward", None, "grad_norm", "", "max")


def test_several_records_of_one_boundary_are_aligned_by_occurrence(differ):
    def evaluated(*norms):
        rows = training(1)
        rows.step = 1
        rows.add("evaluation", "fc1", "input")
        for norm in norms:
            rows.add("evaluation", "fc1", "output", min=-1.0, max=1.0, norm=norm)
        return rows

    assert not differ(evaluated(1.0, 2.0, 3.0), evaluated(1.0, 2.0, 3.0)).found
    found = differ(evaluated(1.0, 2.0, 3.0), evaluated(1.0, 2.5, 3.0))
    assert (found.first.a.norm, found.first.b.norm, found.differing) == (2.0, 2.5, 1)
    found = differ(evaluated(1.0, 2.0, 3.0), evaluated(1.0, 2.0))
    assert (found.first, found.only_a) == (None, (Unmatched("fc1", 1, 1),))


def test_calls_and_passes_are_told_apart(differ):
    def twice(first, second, **key):
        rows = training(1)
        rows.step = 1
        rows.add("forward", "fc1", "output", norm=first, min=-1.0, max=1.0)
        rows.add("forward", "fc1", "output", norm=second, min=-1.0, max=1.0, **key)
        return rows

    for key in ({"call": 1}, {"micro_step": 1}, {"path": "1"}):
        found = differ(twice(1.0, 2.0, **key), twice(1.0, 3.0, **key))
        assert {name: getattr(found.first.a, name) for name in key} == key
        assert (found.first.a.norm, found.first.b.norm, found.differing) == (2.0, 3.0, 1)


def test_replays_operations_and_events_are_no_boundaries(differ):
    plain, replayed = training(1), training(1)
    replayed.step = 0
    replayed.birth("SqrtBackward0", "fc1")
    replayed.replay()
    replayed.skip()
    replayed.add("forward", "fc1", "output", op="AddmmBackward0")
    found = differ(plain, replayed)
    assert not found.found
    assert found.compared == A_STEP


def test_the_step_in_which_a_run_broke_off_may_lack_its_end(differ):
    whole, broken = training(2), training(1)
    broken.step = 1
    forward(broken)
    assert not differ(whole, broken, info_b={"end": "exception RuntimeError"}).found
    found = differ(whole, broken, info_b={"end": "completed"})
    assert found.first is None
    # All of backward and the parameters; the loss, which belongs to no module, first.
    counts = ((None, 1), ("", 1), ("fc1", 3), ("act", 2), ("fc2", 4))
    assert found.only_a == tuple(Unmatched(module, records, 1) for module, records in counts)


def test_only_modules_that_match_are_compared(differ):
    other = training(changed=0, forward={"act": {"norm": 1e6}, "fc2": {"norm": 1e6}})
    found = differ(training(), other, modules=["fc?"])
    assert where(found.first)[2] == "fc2"
    assert found.modules_compared == 2
    with pytest.raises(NoMatchError, match=r"no module matches 'layer\.\*'; names look like: fc2, act, fc1"):
        differ(training(), other, modules=["layer.*"])


def test_the_most_modules_are_listed_and_all_are_counted(differ):
    other = training(changed=0, forward={name: {"norm": 1e6} for name in ("fc1", "act", "fc2", "out")})
    found = differ(training(), other, most=2)
    assert (len(found.modules), found.modules_differing, found.modules_compared) == (2, 4, 4)
    assert len(differ(training(), other, most=None).modules) == 4


def ranks(tmp_path, name, numbers, changed=None):
    """Write a run of several ranks; ``changed`` maps those in which an output is another to the step where it is."""
    for rank in numbers:
        step = (changed or {}).get(rank)
        rows = training() if step is None else training(changed=step, forward={"act": {"norm": 1e6}})
        records = [row._replace(rank=rank) for row in rows.records]
        write_run(tmp_path / name, records, rank=rank, world_size=max(numbers) + 1, modules=MODULES)
    return tmp_path / name


def test_ranks_are_compared_with_those_of_the_same_number(tmp_path, differ):
    a = ranks(tmp_path, "one", [0, 1, 2])
    b = ranks(tmp_path, "other", [0, 1, 2], changed={0: 2, 1: 1})
    found = differ(a, b)
    assert (found.first.a.rank, found.first.b.rank, found.first.a.step) == (1, 1, 1)
    assert (found.compared, found.differing, found.overlap.ranks) == (9 * A_STEP, 2, (0, 1, 2))
    assert not differ(a, b, rank=2).found
    with pytest.raises(NoMatchError, match="rank 3 is not in both runs; A has ranks 0, 1, 2, B has ranks 0, 1, 2"):
        differ(a, b, rank=3)


def test_ranks_that_only_one_run_has_are_said(tmp_path, differ):
    found = differ(ranks(tmp_path, "one", [0, 1, 2]), ranks(tmp_path, "other", [0, 1]))
    assert not found.found
    assert (found.overlap.ranks, found.overlap.ranks_only_a, found.overlap.ranks_only_b) == ((0, 1), (2,), ())


def test_two_single_processes_are_compared_whatever_their_ranks(tmp_path, differ):
    a, b = ranks(tmp_path, "one", [0, 1]), ranks(tmp_path, "other", [0, 1], changed={1: 1})
    found = differ(a / "rank-0.parquet", b / "rank-1.parquet")
    assert (found.first.a.rank, found.first.b.rank, found.first.a.module) == (0, 1, "act")
    with pytest.raises(NoMatchError, match="rank 0 is not in both runs; A has rank 0, B has rank 1"):
        differ(a / "rank-0.parquet", b / "rank-1.parquet", rank=0)
    with pytest.raises(NoMatchError, match="no rank in common: A has ranks 0, 1, B has ranks 2, 3"):
        differ(a, ranks(tmp_path, "third", [2, 3]))


def test_nothing_in_common_is_said_with_what_to_check(differ):
    late = Rows()
    late.step = 100
    healthy(late, 2)
    with pytest.raises(NoMatchError, match=r"no step .* A has steps 0 to 2, B has steps 100 to 101; .*first-step"):
        differ(training(), late)
    named = Rows()
    named.add("forward", "encoder", "output")
    alone = Rows()
    alone.add("forward", "decoder", "output")
    one, other = ({"modules": [ModuleInfo(name, "Linear")]} for name in ("encoder", "decoder"))
    with pytest.raises(
        NoMatchError, match="no boundary in common in 1 step; modules of A: encoder; of B: decoder: are"
    ):
        differ(named, alone, info_a=one, info_b=other)
    with pytest.raises(NoMatchError, match=r"b\.parquet has no records to compare$"):
        differ(training(), Rows())
    with pytest.raises(NoMatchError, match=r"a\.parquet has no records to compare in these steps"):
        differ(training(), training(), steps=(7, 9))


def test_a_run_that_is_closed_is_not_compared(tmp_path):
    path = write_run(tmp_path / "a.parquet", training().records)
    with open_run(path) as closed:
        pass
    with open_run(path) as run, pytest.raises(RunClosedError):
        run.diff(closed)


def test_a_run_that_is_still_recorded_is_compared(tmp_path, differ):
    writer = RunWriter(tmp_path / "live.parquet", RunInfo("test", modules=MODULES))
    rows = training(2, 1, forward={"act": {"norm": 1e6}})
    writer.write(batch_of_records(rows.records))
    try:
        found = differ(training(), tmp_path / "live.parquet")
    finally:
        writer.finish(RunInfo("test", end="completed"))
    assert where(found.first) == (1, "forward", "act", "output", "0", "norm")
    assert (found.b.end, found.overlap.only_a) == ("running", 1)


def test_stretches_add_up_to_the_same_answer(differ, monkeypatch):
    other = training(9, 4, forward={"act": {"norm": 1e6}}, backward={"fc1": {"norm": 1e5}})
    other.records[7 * 20 + 4] = other.records[7 * 20 + 4]._replace(norm=1e9)  # the output of act in step 7
    at_once = differ(training(9), other)
    shares = []
    monkeypatch.setattr(
        "gradtrace.analysis.compare.compare.ROWS_AT_ONCE", 2 * A_STEP + 2
    )  # of both runs: two steps and more
    by_stretches = differ(training(9), other, progress=shares.append)
    assert dataclasses.replace(by_stretches, a=at_once.a, b=at_once.b) == at_once
    assert (at_once.first.a.step, at_once.differing) == (4, 3)
    assert [(line.first.a.step, line.worst.a.step) for line in at_once.modules] == [(4, 7), (4, 4)]
    assert shares == pytest.approx([2 / 9, 4 / 9, 6 / 9, 8 / 9, 1.0])


def test_the_method_of_a_run_takes_a_run_or_a_path(tmp_path):
    a = write_run(tmp_path / "a.parquet", training().records, modules=MODULES)
    b = write_run(tmp_path / "b.parquet", training(changed=2, forward={"fc2": {"norm": 9e9}}).records, modules=MODULES)
    with open_run(a) as one, open_run(b) as other:
        assert one.diff(other) == one.diff(b) == one.diff(str(b))
        assert where(one.diff(other).first) == (2, "forward", "fc2", "output", "0", "norm")
        assert not one.diff(other, steps=(0, 2)).found
        assert not one.diff(other, rtol=1.0).found
        assert other.sql("SELECT count(*) FROM records").rows == [(60,)]  # it was not closed


def test_as_a_table_it_is_the_modules_that_differ(differ):
    found = differ(training(), training(changed=1, forward={"act": {"nan_count": 2}}))
    assert found.df().to_dict("records") == [
        {
            "module": "act", "type": "ReLU", "compared": 12, "differing": 1, "first_step": 1, "first_phase": "forward",
            "first_tensor": "output", "first_path": "0", "difference": math.inf, "step": 1, "phase": "forward",
            "tensor": "output", "path": "0", "statistic": "nan_count",
        }
    ]  # fmt: skip
    empty = differ(training(), training()).arrow()
    assert (empty.num_rows, str(empty.schema.field("difference").type)) == (0, "double")


def test_model_of_a_renamed_root_is_compared_by_its_modules(differ):
    renamed = [ModuleInfo("", "Wrapper", root=True), *MODULES[1:]]
    found = differ(training(), training(), info_b={"modules": renamed})
    assert [(change.kind, change.name, change.a, change.b) for change in found.changes] == [
        ("module_type", "", "Net", "Wrapper")
    ]
    assert not found.found
