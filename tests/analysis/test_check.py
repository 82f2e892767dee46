"""What holds for all rules of ``check``: their files, the order of findings, which records count, and a healthy run."""

from __future__ import annotations

import math
import re
from importlib import resources
from pathlib import Path

import pytest

from docs import rules_page
from gradtrace.analysis.check.model import Checkup
from gradtrace.analysis.check.rule_files import Rule, all_rules, chosen_rules, read_rule
from gradtrace.errors import NoMatchError
from tests.analysis.rows import MODULES, NAN, Rows, open_rows
from tests.analysis.symptoms import checkup, gradients, losses, said
from tests.documentation import DOCS
from tests.traces import write_run

GROWTH = [1.0] * 6 + [10.0, 90.0, 1000.0]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_the_head_of_a_rule_is_complete_and_its_query_uses_each_threshold(rule: Rule) -> None:
    texts = (rule.title, rule.meaning, rule.mend, rule.value, rule.looks_at)
    assert all(len(text) >= 8 for text in texts)
    assert rule.thresholds
    assert all(len(one.meaning) > 10 and len(one.source) > 10 for one in rule.thresholds)
    assert set(re.findall(r"\$(\w+)", rule.query)) == {one.name for one in rule.thresholds}
    assert rule.least_steps >= 1


def test_a_rule_has_the_name_of_its_file() -> None:
    files = resources.files("gradtrace.analysis.check").joinpath("rules").iterdir()
    assert sorted(file.name for file in files) == sorted(f"{rule.name}.sql" for rule in all_rules())


def test_the_page_of_the_rules_is_what_their_files_say() -> None:
    assert (DOCS / "rules.md").read_text(encoding="utf-8") == rules_page.page()


HEAD = """\
-- too-big: A title
-- severity: note
-- meaning: One line
--   and another.
-- mend: Mend it.
-- value: a value
-- looks at: everything
-- needs: most + 2 full
-- threshold most = 1.5e1 times: of all
-- source most: our choice
SELECT $most
"""


def test_a_head_is_read_into_a_rule() -> None:
    rule = read_rule(HEAD)
    assert (rule.name, rule.title, rule.severity) == ("too-big", "A title", "note")
    assert rule.meaning == "One line and another."
    assert (rule.least_steps, rule.needs_full) == (17, True)
    assert rule.query == "SELECT $most"
    (most,) = rule.thresholds
    assert (most.name, most.value, most.unit, most.meaning, most.source) == (
        "most", 15.0, "times", "of all", "our choice"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("-- mend: Mend it.\n", "", "the head of too-big lacks or should not have: mend"),
        ("-- source most: our choice\n", "", "lacks or should not have: source most"),
        ("-- value: a value\n", "-- value: a value\n-- colour: red\n", "lacks or should not have: colour"),
        ("severity: note", "severity: bad", "none of serious, warning, note: bad"),
        ("-- meaning: One line", "-- meaning, one line", "no key and no continuation: -- meaning, one line"),
        (HEAD, "SELECT 1", "does not begin with a head of comments"),
    ],
)
def test_a_head_that_lacks_something_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_rule(HEAD.replace(old, new))


def test_thresholds_and_rules_are_chosen_by_name() -> None:
    (rule,) = chosen_rules(["near-overflow"], {"near-overflow.factor": 16})
    assert rule.parameters == {"factor": 16}
    assert len(chosen_rules()) == len(all_rules())
    assert chosen_rules() == list(all_rules())  # the change was that call's


@pytest.mark.parametrize(
    ("names", "thresholds", "words"),
    [
        (["near-overflw"], {}, "no rule: 'near-overflw'; did you mean near-overflow?"),
        (["zzz"], {}, "no rule: 'zzz'; there are: exploding-gradients, "),
        ([], {"near-overflow.facto": 1.0}, "no threshold of near-overflow: 'facto'; did you mean factor?"),
        ([], {"dead-outputs.steps": 1.0}, "no rule: 'dead-outputs'; did you mean dead-output?"),
    ],
)
def test_names_that_are_none_are_refused_with_what_was_meant(
    names: list[str], thresholds: dict[str, float], words: str
) -> None:
    with pytest.raises(NoMatchError, match=re.escape(words)):
        chosen_rules(names, thresholds)


def _healthy(rows: Rows, steps: int) -> None:
    """Steps in which everything varies as it does in training: by a third from step to step, the loss going down."""
    for step in range(steps):
        noise = 1 + math.sin(step * 12.9898) / 3
        scale = 1024.0 if step < 20 else 2048.0
        rows.add("input", "", "input", "tokens", dtype="int64", norm=None)
        for number, module in enumerate(("fc1", "act", "fc2"), 1):
            for kind in ("input", "output"):
                facts = {"dtype": "float16", "min": -noise, "max": 300.0 * number * noise, "norm": 40.0 * noise}
                rows.add("forward", module, kind, **facts)
        rows.add("evaluation", "fc1", "output", min=0.0, max=0.0)
        rows.scalar("loss", "loss", (0.2 + 2.0 / (1 + step)) * noise * scale)
        for number, module in enumerate(("fc2", "fc1"), 1):
            size = noise * scale * number**-3
            facts = {"dtype": "float16", "min": -size / 50, "max": size / 50, "norm": size / 10}
            rows.add("backward", module, "grad_output", **facts)
            rows.add("backward", module, "grad", "weight", min=-size, max=size, norm=2 * size)
            norm = 3.0 + 1e-3 * step * noise
            rows.add("optimizer", module, "param", "weight", shape="[2, 4]", min=-norm / 2, max=norm / 2, norm=norm)
            rows.add("optimizer", module, "param", "frozen", shape="[2, 4]", min=-1.0, max=1.0, norm=2.0)
        if step in (0, 20):
            rows.skip()
        rows.scalar("optimizer", "loss_scale", scale, "0")
        rows.scalar("optimizer", "lr", 0.1 * min(step / 10, 1), "0.0")
        rows.step += 1


def test_no_rule_finds_anything_in_a_healthy_run(tmp_path: Path) -> None:
    rows = Rows()
    _healthy(rows, 120)
    found = checkup(tmp_path, rows)
    assert (found.symptoms, found.lacking, found.found) == ([], [], False)
    assert found.conclusion == f"No finding: {len(all_rules())} rules over 120 steps, 4 modules"
    assert str(found) == found.conclusion
    assert found.arrow().schema.field("value").type == "double"


def test_rules_that_a_run_is_too_short_for_say_so(tmp_path: Path) -> None:
    rows = Rows()
    losses(rows, [1.0, 2.0, 3.0])
    found = checkup(tmp_path, rows)
    lacks = {ask.rule.name: ask.lacks for ask in found.lacking}
    assert lacks["loss-spike"] == "needs 6 steps"
    assert lacks["dead-output"] == "needs 5 steps captured in full"
    assert "near-overflow" not in lacks
    assert found.conclusion == f"No finding: {len(all_rules()) - len(lacks)} rules over 3 steps (0 in full), 4 modules"


def test_findings_come_the_earliest_first_then_the_worst_then_in_model_order(tmp_path: Path) -> None:
    rows = Rows()
    for step in range(9):
        rows.scalar("loss", "loss", 1.0 if step else 2.0)
        for module in ("fc2", "fc1"):
            rows.add("forward", module, "output", dtype="float16", min=0.0, max=60000.0 - step if step else 1.0)
        for module in ("fc2", "act"):
            rows.add("backward", module, "grad", "weight", norm=1e-9 if step and module == "act" else 1.0)
        rows.step += 1
    found = checkup(tmp_path, rows, thresholds={"loss-stuck.same": 8})
    # fc1's output is the same tensor as fc2's, as far as a largest element can tell: the first of them is told.
    assert [(one.since, one.rule, one.module) for one in found.symptoms] == [
        (1, "near-overflow", "fc2"),
        (1, "vanishing-gradients", "act"),
        (1, "loss-stuck", None),
    ]
    assert found.rows[0][:4] == ("near-overflow", "serious", 0, "fc2")
    assert found.df()["since"].tolist() == [1, 1, 1]
    assert "3 findings: " in str(found) and "3 findings: " in found._repr_html_()


def test_steps_limit_what_is_looked_at_and_what_is_compared_with(tmp_path: Path) -> None:
    rows = Rows()
    gradients(rows, "fc1", GROWTH)
    assert len(said(tmp_path / "a", rows, "exploding-gradients", steps=(1, None))) == 2
    assert said(tmp_path / "b", rows, "exploding-gradients", steps=(None, 8)) == []
    (ask,) = checkup(tmp_path / "c", rows, rules=["exploding-gradients"], steps=(4, None)).lacking
    assert ask.lacks == "needs 6 steps"  # there are 4 to 8


def test_each_rank_is_looked_at_for_itself(tmp_path: Path) -> None:
    def of(rank: int, norms: list[float]) -> Rows:
        rows = Rows(rank)
        gradients(rows, "fc1", norms)
        return rows

    path = tmp_path / "run.parquet"
    for rank, norms in enumerate(([1.0] * 9, GROWTH)):
        write_run(path, of(rank, norms).records, rank=rank, world_size=2, modules=MODULES)
    from gradtrace.analysis.run import open_run

    with open_run(path) as run:
        both = run.check(rules=["exploding-gradients"])
        first = run.check(rules=["exploding-gradients"], rank=0)
        assert [one.rank for one in both.symptoms] == [1, 1]
        assert both.conclusion == "2 findings: 1 rule over 9 steps, 4 modules, 2 ranks"
        assert first.symptoms == []
        with pytest.raises(NoMatchError, match="has no rank 2; it has: 0, 1"):
            run.check(rank=2)
        with pytest.raises(NoMatchError, match=r"no recorded step lies in 50:; the run has 0 to 8"):
            run.check(steps=(50, None))


def test_rows_of_operations_and_of_a_replay_are_passed_over(tmp_path: Path) -> None:
    rows = Rows()
    for _ in range(8):
        rows.add("forward", "fc1", "output", max=3e38, op="aten.exp")
        rows.add("forward", "fc1", "output", min=0.0, max=0.0, op="aten.relu")
        rows.add("backward", "fc1", "grad", "weight", norm=1e9, op="MmBackward0")
        rows.birth("ExpBackward0", "fc1", made={"max": 3e38})
        gradients(rows, "fc1", [1.0])
    assert checkup(tmp_path, rows).symptoms == []


def test_asking_twice_gives_the_same_and_an_empty_run_nothing(tmp_path: Path) -> None:
    rows = Rows()
    gradients(rows, "fc1", GROWTH)
    with open_rows(tmp_path / "a", rows) as run:
        once, again = run.check(), run.check()
    assert once.symptoms == again.symptoms != []
    empty: Checkup = checkup(tmp_path / "b", Rows())
    assert (empty.symptoms, empty.steps) == ([], 0)


def test_a_finding_survives_the_failure_that_it_comes_before(tmp_path: Path) -> None:
    rows = Rows()
    gradients(rows, "fc1", GROWTH)
    gradients(rows, "fc1", [5.0], **NAN)
    assert [one.since for one in said(tmp_path, rows, "exploding-gradients")] == [6, 6]
