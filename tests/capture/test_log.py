"""What the recording tells the writer of a step, and what it keeps count of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradtrace.analysis.run import open_run
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning
from gradtrace.trace.writer import RunWriter
from tests.capture.tracing import record


@pytest.fixture
def protected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that the writer was asked to protect."""
    steps: list[int] = []
    monkeypatch.setattr(RunWriter, "protect", lambda self, step: steps.append(step))
    return steps


def test_every_step_of_an_incident_is_protected(tmp_path: Path, protected: list[int]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train() -> None:
        for step in range(9):
            batch = torch.full((1, 2), float("nan") if step in (3, 4, 7) else 1.0)
            optimizer.zero_grad()
            loss = model(batch).sum()
            if step in (3, 4, 7):
                model.requires_grad_(False)  # the weights stay finite
                loss = loss.detach().requires_grad_()
            loss.backward()
            model.requires_grad_(True)
            optimizer.step()

    recorded = record(model, tmp_path, train)
    assert recorded.info.incidents == 2
    assert sorted(set(protected)) == [3, 4, 7]


def test_a_streak_of_skipped_steps_is_protected_from_its_first_step_on(tmp_path: Path, protected: list[int]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=0.99)

    def train() -> None:
        for step in range(14):
            optimizer.zero_grad()
            size = 1e-30 if step < 2 else 100.0  # times the scale: more than a float32 holds
            scaler.scale((model(torch.ones(1, 2)) * size).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    recorded = record(model, tmp_path, train)
    assert len(recorded.where(tensor="skip")) == 12
    assert sorted(set(protected)) == [2, 11, 12, 13]


def test_a_run_beyond_its_limit_is_thinned_with_a_warning(tmp_path: Path) -> None:
    limit, steps = 400_000, 250
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)], nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    with (
        pytest.warns(GradtraceWarning, match=r"to stay within 0.4 MB, steps 1 to \d+ were thinned") as caught,
        Tracer(model, tmp_path / "run.parquet", max_size=limit) as tracer,
    ):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert len(caught) == 1
    assert (tmp_path / "run.parquet").stat().st_size <= limit
    with open_run(tmp_path / "run.parquet") as run:
        found = run.execute("SELECT level, count(*), count(loss), count(grad_norm) FROM steps GROUP BY ALL").fetchall()
        counts = {level: numbers for level, *numbers in found}
        assert counts["full"][0] + counts["watched"][0] == steps == run.steps
        assert all(losses == norms == count for count, losses, norms in counts.values())
        assert run.captured == run.info.captured == counts["full"][0]
        assert (run.info.records, run.info.captured) == (tracer.info.records, tracer.info.captured)
        outputs = run.execute("SELECT count(*) FROM records WHERE tensor = 'output' AND module = ''").fetchall()
        assert outputs == [(steps,)]
        starts = run.execute("SELECT count(*) FROM records WHERE tensor = 'param' AND phase = 'input'").fetchall()
        assert starts == [(42,)]


def test_the_norm_of_a_thinned_step_is_that_of_its_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)], nn.Linear(3, 1))
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    truth = []
    with pytest.warns(GradtraceWarning), Tracer(model, tmp_path / "run.parquet", max_size=400_000):
        for _ in range(250):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            truth.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item())  # type: ignore[union-attr]
            optimizer.step()
    with open_run(tmp_path / "run.parquet") as run:
        found = run.execute("SELECT step, max FROM records WHERE tensor = 'grad_norm'").fetchall()
    assert len(found) > 50
    assert [norm for _, norm in found] == [pytest.approx(truth[step], rel=1e-6) for step, _ in found]


def test_steps_captured_in_full_are_counted(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(7):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    assert record(model, tmp_path, train).info.captured == 7
    assert record(model, tmp_path, train, every=3).info.captured == 3
