"""The tables of ``overhead.py``, in Markdown. Only form: everything comes from the pairs that were measured."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.models import TITLES
from benchmarks.pairs import Costs, Estimate, difference, ratio

QUOTED = (
    ("cnn", "forward", 22.8),
    ("resnet50", "backward", 16.4),
    ("gpt256", "step", 18.1),
)
"""What anomaly detection is said to add, in percent: to which part of the step of which model."""

TARGETS = {
    "full": {"cnn": 1.15, "resnet50": 1.08, "gpt256": 1.05, "gpt512": 1.05, "mlp": 1.30, "lstm": 1.05},
    "watch": {"cnn": 1.03, "resnet50": 1.01, "gpt256": 1.01, "gpt512": 1.01, "mlp": 1.05},
}
"""What a step is to cost at most. A target is reached when the whole interval is at or under it."""

FLOOR_SHARE = {("full", "resnet50"): 1.3}
"""Where reading alone may cost more than the target: how many times what the floor adds is good enough."""


def everything(measured: Sequence[Costs], base: str) -> str:
    """Return all tables that the measurements fill."""
    parts = [ratios(measured, base)]
    if base == "off":
        parts += [targets(measured), quoted(measured)]
    parts += [details(measured), failures(measured)]
    return "\n\n".join(part for part in parts if part)


def in_short(costs: Costs) -> str:
    """Return one line with the ratios of a model, for those who wait."""
    known = [f"{name} {bounded(ratio(pairs))}" for name, pairs in costs.pairs.items()]
    unknown = [f"{name or 'all'}: {why}" for name, why in costs.failures.items()]
    return f"{costs.model}: {', '.join(known + unknown)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, '' for one without rows."""
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def bounded(of: Estimate, digits: int = 3) -> str:
    """Return a median with its interval."""
    return f"{of.median:.{digits}f} ({of.low:.{digits}f} to {of.high:.{digits}f})"


def ratios(measured: Sequence[Costs], base: str) -> str:
    """Return a line for each model with the step of every variant as a multiple of the base's."""
    names = list(dict.fromkeys(name for costs in measured for name in costs.pairs))
    rows = [
        [TITLES[costs.model], f"{_milliseconds(costs, base):.1f} ms", *(_ratio(costs, name) for name in names)]
        for costs in measured
        if costs.pairs
    ]
    return table(["model", f"step, {base}", *(f"{base} again" if name == base else name for name in names)], rows)


def details(measured: Sequence[Costs]) -> str:
    """Return a line for each model and variant: parts of the step, processor time, milliseconds more."""
    rows = [
        [
            *(costs.model, name),
            *(bounded(ratio(pairs, part)) for part in ("forward", "backward", "step", "cpu")),
            bounded(difference(pairs)),
        ]
        for costs in measured
        for name, pairs in costs.pairs.items()
    ]
    return table(["model", "variant", "forward", "backward", "step", "processor time", "ms a step more"], rows)


def targets(measured: Sequence[Costs]) -> str:
    """Return a line for each model and recording that has a target."""
    rows = []
    for costs in measured:
        for variant, bounds in TARGETS.items():
            if variant not in costs.pairs or costs.model not in bounds:
                continue
            target, step = bounds[costs.model], ratio(costs.pairs[variant])
            share = FLOOR_SHARE.get((variant, costs.model))
            if share and "floor" in costs.pairs:
                target = max(target, 1 + share * (ratio(costs.pairs["floor"]).median - 1))
            rows.append(
                [
                    *(costs.model, variant, bounded(step), f"{target:.3f}", "yes" if step.high <= target else "no"),
                    *(_share(costs, variant, other) for other in ("floor", "detect_anomaly")),
                ]
            )
    header = ["model", "variant", "step", "target", "reached", "of what the floor adds", "of what detect_anomaly adds"]
    return table(header, rows)


def quoted(measured: Sequence[Costs]) -> str:
    """Return what is said of anomaly detection beside what was measured."""
    rows = []
    for model, part, said in QUOTED:
        for costs in measured:
            if costs.model == model:
                shown = [_percent(costs, name, part) for name in ("detect_anomaly", "full", "watch")]
                rows.append([f"{TITLES[model]}: {part}", f"{said:.1f} %", *shown])
    return table(["added to", "detect_anomaly, as quoted", "detect_anomaly, here", "full", "watch"], rows)


def failures(measured: Sequence[Costs]) -> str:
    """Return a line for each thing that could not be measured."""
    return "\n".join(
        f"* {costs.model}{', ' if name else ''}{name}: {why}"
        for costs in measured
        for name, why in costs.failures.items()
    )


def _ratio(costs: Costs, name: str) -> str:
    return bounded(ratio(costs.pairs[name])) if name in costs.pairs else "-"


def _percent(costs: Costs, name: str, part: str) -> str:
    if name not in costs.pairs:
        return "-"
    added = ratio(costs.pairs[name], part)
    return bounded(Estimate(*(100 * (bound - 1) for bound in added)), 1) + " %"


def _share(costs: Costs, variant: str, other: str) -> str:
    """Return how much of what another variant adds this one adds, by their medians."""
    if other not in costs.pairs:
        return "-"
    added = ratio(costs.pairs[other]).median - 1
    return f"{(ratio(costs.pairs[variant]).median - 1) / added:.2f}" if added > 0 else "-"


def _milliseconds(costs: Costs, base: str) -> float:
    steps = sorted(block.step for block, _ in costs.pairs[base])
    return steps[len(steps) // 2]
