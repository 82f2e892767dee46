"""Models for which torch generates code, recorded with ``--keep-compiled`` and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from gradtrace.capture.tracer import Tracer
from tests.integrations.running import SCRIPTS, record, run, verdict_on

KEPT = ("-m", "gradtrace", "record", "--keep-compiled", str(SCRIPTS / "compiled.py"))
RAN_COMPILED = "note: 13 modules ran inside of compiled regions and cannot be seen: below the root"


@pytest.mark.parametrize(
    ("way", "note", "seen"),
    [
        ("whole", RAN_COMPILED, "1 of 14 modules"),
        ("method", RAN_COMPILED, "1 of 14 modules"),
        ("part", "note: 10 modules ran inside of compiled regions and cannot be seen: below blocks", "4 of 14 modules"),
    ],
)
def test_a_compiled_training_is_the_same_training(way: str, note: str, seen: str, tmp_path: Path) -> None:
    alone = run(str(SCRIPTS / "compiled.py"), way, "-1", cwd=tmp_path)
    recorded = run(*KEPT, way, "-1", cwd=tmp_path)
    assert recorded.stdout == alone.stdout and len(alone.stdout.splitlines()) == 5
    assert recorded.stderr.count(f"gradtrace: {note}\n") == 1
    assert f"wrote run.parquet: 4 steps, {seen}, " in recorded.stderr


def test_by_default_a_compiled_training_runs_eagerly_and_that_is_said_once(tmp_path: Path) -> None:
    done = record(tmp_path, "compiled.py", "whole", "-1")
    assert done.stderr.count("torch.compile ran eagerly while recording") == 1
    assert "wrote run.parquet: 4 steps, 14 of 14 modules, " in done.stderr


def test_a_bad_batch_of_a_compiled_training_that_is_watched_is_found(tmp_path: Path) -> None:
    run(*KEPT[:4], "--watch", *KEPT[4:], "whole", "2", cwd=tmp_path)
    verdict = verdict_on(tmp_path)
    assert (verdict["step"], verdict["tensor"], verdict["module"]) == (2, "input", "")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.filterwarnings(  # of torch's own, while it compiles
    "ignore:.*torch.jit.*", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
@pytest.mark.parametrize("way", ["step", "whole"])
def test_a_compiled_optimizer_is_still_the_clock(way: str, tmp_path: Path) -> None:
    def train_compiled() -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def whole(batch: Tensor) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        step = torch.compile(optimizer.step, backend="aot_eager")
        train_on = torch.compile(whole, backend="aot_eager")
        for batch in torch.randn(3, 5, 3):
            if way == "whole":
                train_on(batch)
            else:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                step()
        return [p.detach().clone() for p in model.parameters()]

    plain = train_compiled()
    with Tracer(None, tmp_path / "run.parquet", keep_compiled=True) as tracer:
        weights = train_compiled()
    assert all(torch.equal(one, other) for one, other in zip(plain, weights, strict=True))
    assert (tracer.info.end, tracer.info.steps) == ("completed", 3)
