"""What differs between two runs besides their records."""

from __future__ import annotations

import pytest

from gradtrace.analysis.compare.facts import changes, module_changes
from gradtrace.analysis.compare.parts import Change
from gradtrace.trace.runinfo import ModuleInfo, RunInfo

LINEAR = {"weight": "[2, 4]", "bias": "[2]"}
MODULES = [
    ModuleInfo("", "Net", root=True),
    ModuleInfo("body", "Sequential"),
    ModuleInfo("body.0", "Linear", parameters=LINEAR),
    ModuleInfo("body.1", "ReLU"),
    ModuleInfo("head", "Linear", parameters=LINEAR),
]


def differing(a: dict, b: dict) -> list[Change]:
    return list(changes([RunInfo("a", **a)], [RunInfo("b", **b)]))


def tables(a: list[ModuleInfo], b: list[ModuleInfo]) -> list[Change]:
    return list(module_changes(*({module.name: module for module in modules} for modules in (a, b))))


def test_equal_facts_differ_in_nothing():
    facts = {"command": ["train.py"], "versions": {"torch": "2.13.0"}, "config": {"every": 1}, "modules": MODULES}
    assert differing(facts, facts) == []


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("train.py --lr 3e-4 --amp", "train.py --lr 6e-4 --amp", [("--lr 3e-4", "--lr 6e-4")]),
        ("train.py --lr 3e-4", "train.py", [("--lr 3e-4", None)]),
        ("train.py --amp", "train.py --amp --seed 1", [(None, "--seed 1")]),
        ("train.py --lr=1", "train.py --lr=2", [("--lr=1", "--lr=2")]),
        ("old.py --lr 1", "new.py --lr 1", [("old.py", "new.py")]),
        ("t.py --lr 1 --amp -b 8", "t.py --lr 2 --amp -b 4", [("--lr 1", "--lr 2"), ("-b 8", "-b 4")]),
    ],
)
def test_of_two_commands_the_arguments_that_differ_are_named_with_their_options(a, b, expected):
    found = differing({"command": a.split()}, {"command": b.split()})
    assert found == [Change("command", "", *sides) for sides in expected]


def test_versions_and_configuration():
    a = {"versions": {"python": "3.11.7", "torch": "2.13.0"}, "config": {"every": 1, "steps": None}}
    b = {"versions": {"torch": "2.14.0", "python": "3.11.7"}, "config": {"every": 10}, "gradtrace_version": "0.1.0"}
    assert differing(a, b) == [
        Change("version", "torch", "2.13.0", "2.14.0"),
        Change("version", "gradtrace", "", "0.1.0"),
        Change("config", "every", 1, 10),  # what was not set is the same as what was not known
    ]


def test_types_and_parameter_shapes():
    other = [
        *MODULES[:3],
        ModuleInfo("body.1", "GELU"),
        ModuleInfo("head", "Linear", parameters={"weight": "[3, 4]"}),
    ]
    assert tables(MODULES, other) == [
        Change("module_type", "body.1", "ReLU", "GELU"),
        Change("module_parameters", "head.weight", "[2, 4]", "[3, 4]"),
        Change("module_parameters", "head.bias", "[2]", None),
    ]


def test_of_modules_that_are_gone_or_new_the_topmost_is_named():
    assert tables(MODULES, [MODULES[0], MODULES[4]]) == [Change("module_removed", "body", a="Sequential")]
    assert tables([MODULES[0], MODULES[4]], MODULES) == [Change("module_added", "body", b="Sequential")]


def test_a_module_that_is_the_same_under_another_name_is_renamed():
    renamed = [
        MODULES[0],
        ModuleInfo("trunk", "Sequential"),
        ModuleInfo("trunk.0", "Linear", parameters=LINEAR),
        ModuleInfo("trunk.1", "ReLU"),
        MODULES[4],
    ]
    assert tables(MODULES, renamed) == [Change("module_renamed", "body", "body", "trunk")]
    renamed[3] = ModuleInfo("trunk.1", "GELU")
    assert tables(MODULES, renamed) == [
        Change("module_removed", "body", a="Sequential"),
        Change("module_added", "trunk", b="Sequential"),
    ]


def test_each_new_module_is_the_renamed_one_of_one_that_is_gone():
    a = [ModuleInfo(name, "ReLU") for name in ("x", "y")]
    assert tables(a, [ModuleInfo("z", "ReLU")]) == [
        Change("module_renamed", "x", "x", "z"),
        Change("module_removed", "y", a="ReLU"),
    ]


def test_the_modules_of_all_ranks_count():
    one, other = RunInfo("a", modules=MODULES[:1]), RunInfo("a", rank=1, modules=MODULES)
    assert changes([one, other], [RunInfo("b", modules=MODULES)]) == ()


def test_five_thousand_renamed_modules_are_found_at_once():
    before, after = ([ModuleInfo(f"{name}{n}", "Linear", parameters=LINEAR) for n in range(5_000)] for name in "ab")
    found = tables(before, [*after, ModuleInfo("more", "ReLU")])
    renamed = [Change("module_renamed", f"a{n}", a=f"a{n}", b=f"b{n}") for n in range(5_000)]
    assert found == [*renamed, Change("module_added", "more", b="ReLU")]
