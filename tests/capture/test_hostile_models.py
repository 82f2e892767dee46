"""A model whose names, classes and files try what names can try: recorded under these very names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradtrace.analysis.run import open_run
from gradtrace.capture.tracer import Tracer
from gradtrace.errors import GradtraceWarning, NonFiniteError
from gradtrace.printable import printable
from tests.hostile import ALL, NAMES

HALF = "half \ud800 of a character"
FILE = "/odd\x1b[2J\n\u202e.py"


def odd_class(name: str) -> type[nn.Module]:
    """Return a class of that name whose forward stands in a file of an odd name."""
    found: dict[str, Any] = {}
    exec(compile("def forward(self, x):\n    return x * next(self.parameters())\n", FILE, "exec"), found)
    kind = name.replace("\0", "").encode(errors="replace").decode()  # Python itself takes no others
    return type(kind or "Odd", (nn.Module,), {"forward": found["forward"]})


class Model(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for name in names:
            child = odd_class(name[:1000])()
            child.register_parameter(name.replace(".", "_") or "p", nn.Parameter(torch.full((2,), 2.0)))
            self._modules[name] = child  # add_module refuses dots, and takes all else

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self._modules.values():
            x = child(x)
        return x


def train(path: Path, names: tuple[str, ...], **options: Any) -> Model:
    model = Model(names)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Tracer(model, path=path, **options):
        for step in range(2):
            loss = model(torch.full((2,), 3e38 if step else 1.0)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def test_every_name_is_in_the_file_as_it_is_in_the_model(tmp_path: Path) -> None:
    names = tuple(name for name in NAMES if name)
    with pytest.warns(GradtraceWarning) as warned:
        model = train(tmp_path / "run.parquet", names)
    assert all(str(warning.message).isprintable() for warning in warned)
    with open_run(tmp_path / "run.parquet") as run:
        assert run.end == "completed"
        found = run.sql("select module, type, file from modules order by number").rows
        called = run.sql("select distinct module, path from records where tensor = 'grad'").rows
    assert [row[0] for row in found] == ["", *names]
    assert [row[1] for row in found[1:]] == [type(child).__name__ for child in model.children()]
    assert {row[2] for row in found[1:]} == {FILE}
    assert {module for module, _ in called} == set(names)
    assert (ALL, ALL.replace(".", "_")) in called


def test_a_name_that_is_no_unicode_is_recorded_by_its_escape(tmp_path: Path) -> None:
    with pytest.warns(GradtraceWarning):
        train(tmp_path / "run.parquet", (HALF, "whole"))
    with open_run(tmp_path / "run.parquet") as run:
        assert run.end == "completed"
        modules = {name for (name,) in run.sql("select module from modules").rows}
        recorded = {name for (name,) in run.sql("select distinct module from records where module is not null").rows}
    assert modules == recorded == {"", "half \\ud800 of a character", "whole"}


@pytest.mark.parametrize(("pattern", "chosen"), [("*quoted*", ['"quoted"']), ("a?b*", ["a,b;c"]), ("[A]", ["A"])])
def test_patterns_choose_modules_of_odd_names(tmp_path: Path, pattern: str, chosen: list[str]) -> None:
    with pytest.warns(GradtraceWarning):
        train(tmp_path / "run.parquet", ("a", "A", '"quoted"', "a,b;c", "a\nc"), include=[pattern])
    with open_run(tmp_path / "run.parquet") as run:
        query = "select distinct module from records where tensor = 'output' and op is null and module <> ''"
        rows = run.sql(query).rows
    assert [name for (name,) in rows] == chosen


def test_the_fuse_names_the_boundary_on_one_line_and_a_command_to_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J b"
    folder.mkdir()
    with pytest.warns(GradtraceWarning), pytest.raises(NonFiniteError) as stopped:
        train(folder / "run.parquet", (ALL,), on_nonfinite="stop")
    words = str(stopped.value)
    assert words.isprintable() and printable(ALL) in words
    assert words.endswith("; for the verdict: gradtrace first-nan $'" + f"{tmp_path}/a\\x1b[2J b/run.parquet'")
