"""What is said of two runs, from data made by hand."""

from __future__ import annotations

import math

from gradtrace.analysis.compare.model import Difference, ModuleDifference
from gradtrace.analysis.compare.parts import Change, Kinds, Overlap, Pair, ScalarChange, Side, Unmatched
from gradtrace.analysis.compare.text import notes, report, text
from gradtrace.analysis.verdict_text import Table
from gradtrace.trace.schema import Record

A = Side("a.parquet", ("train.py",), 10, 1000, 1, "completed")
B = Side("b.parquet", ("train.py",), 12, 1200, 1, "completed")
OVERLAP = Overlap(steps=10, first=0, last=9, full=10, only_a=0, only_b=2, ranks=(0,))


def difference(**values) -> Difference:
    facts = {
        "a": A,
        "b": B,
        "overlap": OVERLAP,
        "tolerances": {"float32": 3.5e-4},
        "compared": 1000,
        "modules_compared": 5,
    }
    return Difference(**(facts | values))


def lines(**values) -> list[str]:
    """Return the lines of text after the table of the runs."""
    return [block for block in report(difference(**values)) if isinstance(block, str) and block]


def test_modules_that_are_gone_new_or_renamed():
    changes = (
        Change("module_renamed", "body", "body", "trunk"),
        Change("module_removed", "", a="Net"),
        *(Change("module_added", f"block.{number}", b="Block") for number in range(5)),
        Change("module_parameters", "head.bias", "[2]", None),
    )
    assert lines(changes=changes)[:4] == [
        "  other shape head.bias [2] in A, none in B",
        "  renamed     body in A is trunk in B",
        "  only in A   (root) (Net)",
        "  only in B   block.0 (Block), block.1 (Block), block.2 (Block) and 2 more",
    ]


def test_dtypes_and_devices():
    dtypes = (Kinds("float32", "bfloat16", 900), Kinds("float32", "float16", 9))
    assert lines(dtypes=dtypes, devices=(Kinds("cpu", "cuda:0", 1000),))[:2] == [
        "  dtype       900 of 1,000 records float32 in A, bfloat16 in B; 9 of 1,000 records float32 in A, float16 in B",
        "  device      all records cpu in A, cuda:0 in B",
    ]


def test_a_loss_scale_of_one_of_several_ranks():
    overlap = Overlap(10, 0, 9, full=7, only_a=1, only_b=0, ranks=(0, 1), ranks_only_b=(2, 3))
    scalar = ScalarChange("loss_scale", "0", 1, 3, 65536.0, math.inf, 7)
    alone = (Unmatched("ema", 12, 4), Unmatched(None, 1, 5))
    assert lines(scalars=(scalar,), overlap=overlap, only_a=alone)[:-1] == [
        "  loss_scale 0 65536 in A, inf in B, from step 3 on of rank 1",
        "  compared    1,000 records; 10 steps, 0 to 9; 1 more step in A; 2 ranks",
        "              3 steps were not captured in full by both",
        "  not         rank 2, 3 of B",
        "  A alone     has 13 records in common steps, from step 4 on: ema (12), outside any module (1)",
    ]


def test_no_module_in_common_is_pointed_out():
    assert lines(modules_compared=0)[1] == "              no module in common: are these runs of the same model?"


def test_the_first_difference_names_call_pass_and_rank():
    row = Record(3, 70, "forward", "output", "head", "0", call=2, micro_step=1, rank=1, numel=4, norm=1.0, shape="[4]")
    pair = Pair(row, row._replace(norm=2.0), "norm", 0.5, 3.5e-4)
    overlap = Overlap(10, 0, 9, 10, 0, 0, ranks=(0, 1))
    found = lines(first=pair, first_type="Linear", overlap=overlap, differing=1)
    assert found[-2:] == [
        "First difference: step 3, pass 1, rank 1, forward, head (Linear), output 0 of call 2",
        "  norm 1 in A, 2 in B, 50 % apart (0.035 % is tolerated)",
    ]


def test_the_table_gives_a_share_only_where_there_is_one():
    row = Record(3, 70, "forward", "output", "head", "0", numel=4, max=8.0, norm=1.0, nan_count=0, shape="[4]")
    pairs = (
        Pair(row, row._replace(max=6.0), "max", 0.25, 3.5e-4),
        Pair(row, row._replace(nan_count=1), "nan_count", math.inf, 3.5e-4),
        Pair(row, row._replace(shape="[2, 2]", nan_count=1), "shape", math.inf, 3.5e-4),
    )
    modules = tuple(ModuleDifference(str(number), None, 9, 1, pair, pair) for number, pair in enumerate(pairs))
    table = list(report(difference(modules=modules, first=pairs[0])))[-1]
    assert [row[-4:] for row in table.rows] == [
        ("max", 8, 6, "25 %"),
        ("nan", 0, 1, ""),
        ("shape", "[4]", "[2, 2]", ""),
    ]


def test_a_scalar_has_a_value():
    row = Record(0, 1, "loss", "loss", numel=1, min=-2.0, max=-2.0, norm=2.0, shape="[]")
    pair = Pair(row, row._replace(min=2.0, max=2.0), "max", 2.0, 3.5e-4)
    assert lines(first=pair)[-2:] == [
        "First difference: step 0, loss, outside any module, loss",
        "  value -2 in A, 2 in B, 200 % apart (0.035 % is tolerated)",
    ]


def test_tolerances_are_named_once():
    tolerances = {"float32": 0.0884, "bfloat16": 0.0884, "int64": 0.0}
    assert lines(tolerances=tolerances)[-1] == (
        "No difference in 1,000 records (8.8 % tolerated in float32, bfloat16; int64 must be equal)."
    )


def test_the_runs_come_first_with_their_ranks_where_there_are_several():
    several = Side("c", (), 10, 4000, 4, "exception RuntimeError")
    first = next(report(difference(b=several)))
    assert isinstance(first, Table)
    assert first.columns == ("", "run", "command", "steps", "records", "ranks", "end")
    assert first.rows[1] == ("B", "c", "-", 10, 4000, 4, "exception RuntimeError")


def test_text_and_html_hold_all_of_it():
    found = difference(b=Side("<b>", ("train.py",), 12, 1200, 1, "killed", ("the step after 11 was in flight",)))
    assert list(notes(found)) == ["B: the step after 11 was in flight"]
    assert str(found) == text(found)
    assert text(found).splitlines()[-2:] == [
        "No difference in 1,000 records (0.035 % tolerated in float32).",
        "note: B: the step after 11 was in flight",
    ]
    assert "&lt;b&gt;" in found._repr_html_()
    assert "<b>" not in found._repr_html_()
