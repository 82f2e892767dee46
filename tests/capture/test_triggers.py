"""Which steps watch mode captures in full, on sequences whose answer is worked out by hand."""

from __future__ import annotations

import math
import random
import signal
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradtrace.capture.watch import triggers
from gradtrace.capture.watch.triggers import RunningMedian, Triggers, WatchSchedule
from gradtrace.errors import CaptureError

HEALTHY: dict[str, Any] = {"loss": 1.0, "gradient_norm": 2.0, "rates": {"0.0": 0.1}, "incident": False}


def run(
    schedule: WatchSchedule, steps: Iterable[int], unusual: Mapping[int, dict[str, Any]] | None = None
) -> tuple[list[int], dict[int, str]]:
    """Go through steps, those that are ``unusual`` with other facts; return which were captured, and the words."""
    captured, said = [], {}
    for step in steps:
        before_it_begins = schedule.captures(step)
        words = schedule.switch(step)
        assert schedule.captures(step) == before_it_begins
        if words is not None:
            said[step] = words
        if schedule.captures(step):
            captured.append(step)
        schedule.observe(step, **(HEALTHY | (unusual or {}).get(step, {})))
    return captured, said


def test_a_healthy_run_is_captured_at_its_start_and_watched_from_then_on() -> None:
    assert run(WatchSchedule(), range(500)) == (
        [0, 1, 2, 3, 4],
        {0: "captured in full from step 0: the first 5 steps", 5: "watched from step 5"},
    )


@pytest.mark.parametrize(
    ("first", "said"), [(0, {}), (1, {7: "captured in full from step 7: the first step", 8: "watched from step 8"})]
)
def test_the_first_steps_are_those_of_the_run_whatever_their_numbers(first: int, said: dict[int, str]) -> None:
    assert run(WatchSchedule(Triggers(first=first)), range(7, 20)) == (list(range(7, 7 + first)), said)


# --- what is unusual ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"rates": {"0.0": 1.0}}, "the learning rate went from 0.1 to 1"),
        ({"rates": {"0.0": 0.049}}, "the learning rate went from 0.1 to 0.049"),
        ({"rates": {"0.0": 0.0}}, "the learning rate went from 0.1 to 0"),
        ({"loss": 10.1}, "the loss was 10.1, more than 10 times its median of 1"),
        ({"loss": -10.1}, "the loss was 10.1, more than 10 times its median of 1"),
        ({"gradient_norm": 20.5}, "the gradient norm was 20.5, more than 10 times its median of 2"),
        ({"incident": True}, "an incident began in step 20"),
        (
            {"incident": True, "loss": math.nan, "gradient_norm": 1e3},
            "an incident began in step 20; the gradient norm was 1000, more than 10 times its median of 2",
        ),
    ],
)
def test_three_steps_follow_something_unusual(facts: dict[str, Any], words: str) -> None:
    back = {"rates": facts.get("rates", HEALTHY["rates"])}
    later = dict.fromkeys(range(21, 40), back)

    captured, said = run(WatchSchedule(), range(40), {20: facts} | later)

    assert captured[5:] == [21, 22, 23]
    assert {step: text for step, text in said.items() if step > 5} == {
        21: f"captured in full from step 21: {words}",
        24: "watched from step 24",
    }


@pytest.mark.parametrize(
    "facts",
    [
        {"rates": {"0.0": 0.2}},
        {"rates": {"0.0": 0.05}},
        {"rates": {"0.0": math.nan}},
        {"rates": {"0.0": math.inf}},
        {"rates": {"0.0": 0.1, "0.1": 7.0}},
        {"rates": {}},
        {"loss": 10.0, "gradient_norm": 20.0},
        {"loss": math.nan, "gradient_norm": math.inf},
        {"loss": None, "gradient_norm": None},
    ],
)
def test_what_is_at_its_bound_absent_or_not_finite_is_compared_with_nothing(facts: dict[str, Any]) -> None:
    captured, _ = run(WatchSchedule(), range(40), {20: facts})
    assert captured == [0, 1, 2, 3, 4]


def test_of_several_learning_rates_the_one_that_changed_is_named() -> None:
    two = {step: {"rates": {"0.0": 0.1, "0.1": 0.01 if step < 10 else 0.1}} for step in range(40)}
    _, said = run(WatchSchedule(), range(40), two)
    assert said[11] == "captured in full from step 11: the learning rate of 0.1 went from 0.01 to 0.1"


def test_a_learning_rate_is_compared_with_the_last_one_that_was_seen() -> None:
    gap = {step: {"rates": {}} for step in range(10, 15)}
    higher = {step: {"rates": {"0.0": 0.3}} for step in range(15, 40)}
    captured, _ = run(WatchSchedule(), range(40), gap | higher)
    assert captured[5:] == [16, 17, 18]


def test_a_median_of_fewer_than_ten_values_says_nothing() -> None:
    spikes = {9: {"loss": 1e6}, 30: {"loss": 1e6}}
    captured, _ = run(WatchSchedule(), range(40), spikes)
    assert captured[5:] == [31, 32, 33]  # after step 9 there are nine values to compare with


@pytest.mark.parametrize("where", ["insort", "bisect_left"])
def test_a_median_is_right_again_after_a_signals_handler_has_raised_within_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    median = RunningMedian(10)
    for number in range(10):
        median.add(float(number))
    with monkeypatch.context() as patched:
        patched.setattr(triggers, where, lambda *values: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            median.add(1e6)
    for number in range(20, 31):
        median.add(float(number))
    assert median.value == 25.5  # of 21 to 30


def test_a_spike_is_compared_with_the_steps_before_it_and_not_with_itself() -> None:
    losses = {step: {"loss": 1.0 if step < 10 else 100.0} for step in range(60)}
    captured, _ = run(WatchSchedule(), range(60), losses)
    # The median leaves 1 when as many values are high: with ten of each it is 50.5, and 100 is no spike. Until then
    # each of the steps 10 to 19 is one.
    assert captured == [0, 1, 2, 3, 4, *range(11, 23)]


def test_a_trigger_during_full_capture_prolongs_it_and_says_why() -> None:
    schedule = WatchSchedule(Triggers(first=0))
    captured, said = run(schedule, range(40), {20: {"loss": 50.0}, 22: {"incident": True}})
    assert captured == [21, 22, 23, 24, 25]
    assert said == {
        21: "captured in full from step 21: the loss was 50, more than 10 times its median of 1",
        23: "captured in full for longer: an incident began in step 22",
        26: "watched from step 26",
    }


def test_a_trigger_whose_steps_are_captured_anyway_is_not_worth_a_word() -> None:
    _, said = run(WatchSchedule(), range(10), {1: {"incident": True}})
    assert list(said) == [0, 5]


def test_an_incident_that_lasts_is_captured_once_and_the_next_one_again() -> None:
    bad = {step: {"incident": True, "loss": math.nan} for step in (*range(20, 60), *range(70, 75))}
    captured, _ = run(WatchSchedule(), range(90), bad)
    assert captured[5:] == [21, 22, 23, 71, 72, 73]


def test_what_an_accelerator_tells_late_decides_about_the_steps_that_begin_then() -> None:
    schedule = WatchSchedule(Triggers(first=0))
    for step in range(20):
        schedule.switch(step)
        schedule.observe(step, **HEALTHY)
    schedule.switch(20)
    schedule.switch(21)
    schedule.observe(20, **(HEALTHY | {"incident": True}))
    assert [schedule.captures(step) for step in (20, 21)] == [False, False]
    assert schedule.switch(22) == "captured in full from step 22: an incident began in step 20"
    assert [schedule.captures(step) for step in (21, 22)] == [False, True]


# --- the share ------------------------------------------------------------------------------------------


def always_unusual(steps: int, **triggers: Any) -> list[int]:
    """Return which steps are captured of a run with an incident in every other step."""
    unusual = {step: {"incident": step % 2 == 0} for step in range(steps)}
    captured, _ = run(WatchSchedule(Triggers(**triggers)), range(steps), unusual)
    return captured


def test_of_the_steps_after_the_first_hundred_one_in_a_hundred_is_captured() -> None:
    captured = always_unusual(10_100)

    # All of the first hundred are captured, nothing of them is spent. The first step after them fits when it is 1 % of
    # those from 100 on, which is so in step 199, and the incident in 198 asks for it. It brings two more, so that
    # the fourth is next: in step 499, and so on, each 300 steps. The last one to begin is step 10,099.
    expected = [step + more for step in range(199, 10_100, 300) for more in range(3)][:-2]
    assert captured == [*range(100), *expected]
    assert len(expected) == 100


def test_a_capture_that_began_within_the_first_hundred_steps_counts_after_them() -> None:
    unusual = {98: {"incident": True}, 300: {"incident": True}, 397: {"incident": True}, 399: {"loss": 11.0}}
    captured, _ = run(WatchSchedule(Triggers(first=0)), range(600), unusual)
    # 100 and 101 are spent; a third step is 1 % of those from 100 on in step 399, so that neither 301 nor 398 fits.
    assert captured == [99, 100, 101, 400, 401, 402]


def test_the_share_is_counted_from_nothing() -> None:
    unusual = {step: {"incident": True} for step in (150, 250, 252, 350)}
    captured, _ = run(WatchSchedule(Triggers(first=0)), range(600), unusual)
    # In step 151, 1 % of the 52 steps from 100 on is not one step; of the 152 up to step 251 it is. The three that
    # follow use up what there is until 499.
    assert captured == [251, 252, 253]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=0, max_size=700), st.integers(0, 9), st.sampled_from([0.0, 0.01, 0.05, 0.5, 1]))
def test_the_share_is_never_exceeded_by_more_than_the_rest_of_one_capture(
    incidents: list[bool], after: int, share: float
) -> None:
    unusual = {step: {"incident": incident} for step, incident in enumerate(incidents)}
    schedule = WatchSchedule(Triggers(after=after, share=share))
    captured, _ = run(schedule, range(len(incidents)), unusual)
    for end in range(100, len(incidents)):
        late = sum(100 <= step <= end for step in captured)
        # What began within the first hundred steps is not bound by it.
        assert late <= share * (end - 99) + max(0, after - 1) + 1e-6


def test_a_share_of_all_bounds_nothing() -> None:
    assert always_unusual(400, share=1.0) == list(range(400))


def test_more_first_steps_than_a_hundred_are_as_asked_for_and_spend_nothing() -> None:
    unusual = {350: {"incident": True}}
    captured, _ = run(WatchSchedule(Triggers(first=200)), range(400), unusual)
    assert captured == [*range(200), 351, 352, 353]


# --- steps that are captured whatever the triggers say ---------------------------------------------------


def test_steps_that_were_asked_for_are_captured_and_cost_no_share() -> None:
    schedule = WatchSchedule(also=lambda step: step % 10 == 0)
    captured, said = run(schedule, range(5_000), {4_001: {"incident": True}})
    assert captured == sorted({*range(5), *range(0, 5_000, 10), 4_002, 4_003, 4_004})
    assert list(said) == [0, 5, 4_002, 4_005]
    assert schedule.captures(10**6)
    assert not schedule.captures(10**6 + 1)


def test_full_capture_that_goes_on_because_it_was_asked_for_has_not_ended() -> None:
    captured, said = run(WatchSchedule(also=range(2, 9).__contains__), range(20))
    assert captured == list(range(9))
    assert list(said.values()) == ["captured in full from step 0: the first 5 steps", "watched from step 9"]


# --- another model than before ---------------------------------------------------------------------------


def test_a_model_that_differs_is_captured_in_its_first_twenty_steps() -> None:
    schedule = WatchSchedule()
    schedule.model_differs("fc.weight is [10, 64], was [10, 32]")
    captured, said = run(schedule, range(60))
    assert captured == list(range(20))
    assert said == {
        0: "captured in full from step 0: the first 20 steps, because the model differs from that of the earlier run: "
        "fc.weight is [10, 64], was [10, 32]",
        20: "watched from step 20",
    }


def test_a_difference_that_shows_in_the_first_step_prolongs_what_has_begun() -> None:
    schedule = WatchSchedule()
    run(schedule, range(1))
    schedule.model_differs("act is GELU, was ReLU")
    captured, said = run(schedule, range(1, 60))
    assert captured == list(range(1, 20))
    assert said[1].startswith("captured in full for longer: the first 20 steps, because the model differs")
    assert list(said) == [1, 20]


def test_a_difference_that_shows_later_captures_what_is_left_of_the_first_steps() -> None:
    for shown, expected in ((12, list(range(12, 20))), (20, []), (300, [])):
        schedule = WatchSchedule()
        run(schedule, range(shown))
        schedule.model_differs("act is GELU, was ReLU")
        assert run(schedule, range(shown, 400))[0] == expected


# --- steps numbered by hand ------------------------------------------------------------------------------


def test_numbers_may_jump_and_go_backwards_and_steps_are_counted_as_they_come() -> None:
    numbers = [10, 20, 30, 5, 4, 4000, 3, 2, 1, 0, -7, 50, 60, 70, 80, 51, 61, 71, 81, 91, 92]
    captured, said = run(WatchSchedule(), numbers, {80: {"incident": True}})
    assert captured == [10, 20, 30, 5, 4, 51, 61, 71]
    assert list(said) == [10, 4000, 51, 81]


def test_a_second_training_that_starts_again_at_zero_goes_on_with_the_run() -> None:
    schedule = WatchSchedule()
    assert run(schedule, range(100))[0] == [0, 1, 2, 3, 4]
    assert run(schedule, range(100))[0] == []


def test_asking_twice_about_the_step_in_flight_counts_it_once() -> None:
    schedule = WatchSchedule()
    assert schedule.switch(3) is not None
    assert schedule.switch(3) is None
    assert run(schedule, range(4, 20))[0] == [4, 5, 6, 7]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-3, 10**9),
            st.one_of(st.none(), st.floats()),
            st.one_of(st.none(), st.floats()),
            st.dictionaries(st.text(max_size=2), st.floats(), max_size=3),
            st.booleans(),
        ),
        max_size=150,
    )
)
def test_nothing_that_a_step_may_be_like_raises(steps: list[tuple[Any, ...]]) -> None:
    schedule = WatchSchedule(Triggers(spike_window=10))
    for step, loss, norm, rates, incident in steps:
        assert schedule.captures(step) in (True, False)
        schedule.switch(step)
        schedule.observe(step, loss=loss, gradient_norm=norm, rates=rates, incident=incident)


# --- the running median ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [10, 11, 100])
def test_the_running_median_is_that_of_the_finite_values_in_its_window(window: int) -> None:
    choose = random.Random(window)
    median, values = RunningMedian(window), []
    for _ in range(500):
        value = choose.choice([None, math.nan, math.inf, choose.random(), choose.random(), choose.randrange(3)])
        median.add(value)
        values.append(value)
        finite = [v for v in values[-window:] if v is not None and math.isfinite(v)]
        expected = statistics.median(finite) if len(finite) >= 10 else None
        assert median.value == pytest.approx(expected)


# --- the triggers' own bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"first": -1}, "the trigger first cannot be -1; it is 0 or more steps"),
        ({"after": -1}, "the trigger after cannot be -1; it is 0 or more steps"),
        ({"changed_first": -1}, "the trigger changed_first cannot be -1; it is 0 or more steps"),
        ({"lr_factor": 1}, "the trigger lr_factor cannot be 1; it is a factor above 1"),
        ({"spike_factor": math.nan}, "the trigger spike_factor cannot be nan; it is a factor above 1"),
        ({"spike_factor": math.inf}, "the trigger spike_factor cannot be inf; it is a factor above 1"),
        ({"spike_window": 9}, "the trigger spike_window cannot be 9; it is 10 or more steps"),
        ({"share": 1.5}, "the trigger share cannot be 1.5; it is a part from 0 to 1"),
        ({"share": math.nan}, "the trigger share cannot be nan; it is a part from 0 to 1"),
    ],
)
def test_a_trigger_that_makes_no_sense_is_refused_in_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError) as refused:
        Triggers(**values)
    assert str(refused.value) == message


def test_nothing_unusual_is_captured_where_no_step_is_to_follow_it() -> None:
    captured, said = run(WatchSchedule(Triggers(after=0)), range(40), {20: {"incident": True}})
    assert (captured, list(said)) == ([0, 1, 2, 3, 4], [0, 5])
