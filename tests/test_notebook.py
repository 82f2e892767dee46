"""The example notebook, executed for real: it runs from end to end, and says what it says in the repository.

The outputs there are those of ``jupyter execute --inplace first_nan.ipynb``, asked in ``examples/``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NAME = "first_nan.ipynb"
SCRIPT = "metric_learning.py"

# In a process of its own: the client leaves sockets to the garbage collector, which warns.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.execute(notebook, timeout=300, coalesce_streams=True)
nbformat.write(notebook, sys.argv[1])
"""


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def _outputs(notebook: Any) -> dict[str, Any]:
    """Return the last output of each code cell under the last line of its code, and its data by type."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    return {cell.source.splitlines()[-1]: cell.outputs[-1] for cell in cells}


def _text(output: Any) -> str:
    text: str = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
    return text


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook, executed by this interpreter in a folder of its own, whatever kernels the user has."""
    folder = tmp_path_factory.mktemp("notebook")
    for name in (NAME, SCRIPT):
        shutil.copy(EXAMPLES / name, folder)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    own = dict.fromkeys(
        ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"), str(folder / "own")
    )
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, NAME],
        cwd=folder,
        env=os.environ | own | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return _read(folder / NAME)


@pytest.fixture(scope="module")
def committed() -> Any:
    """The notebook as it is in the repository."""
    return _read(EXAMPLES / NAME)


def test_the_outputs_in_the_repository_are_those_of_one_run_from_top_to_bottom(committed: Any) -> None:
    nbformat.validate(committed)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "execute_result"}
    assert not re.search(r"/tmp|/home|/root|ipykernel_|Warning", str(outputs))


def test_every_cell_gives_what_kind_of_thing_it_gives_in_the_repository(executed: Any, committed: Any) -> None:
    kinds = [
        {code: sorted(output.get("data", {"text": ""})) for code, output in _outputs(notebook).items()}
        for notebook in (executed, committed)
    ]
    assert kinds[0] == kinds[1]
    assert kinds[0]["verdict"] == ["text/html", "text/plain"]
    assert kinds[0]["run.summary()"] == ["text/html", "text/plain"]


def test_the_verdict_names_the_square_root_and_its_line(executed: Any, committed: Any) -> None:
    source = (EXAMPLES / SCRIPT).read_text(encoding="utf-8").splitlines()
    line = source.index("        return (a - b).square().sum(dim=-1).sqrt()") + 1
    for notebook in (executed, committed):
        verdict = _outputs(notebook)["verdict"]
        for text in (_text(verdict), verdict["data"]["text/html"]):
            assert re.search(r"step \d+, backward, distance \(EuclideanDistance\), grad_input 0: \d+ nan of 512", text)
            assert re.search(rf"made by    SqrtBackward0 \((nan|inf)\), {SCRIPT}:{line} in forward: return", text)


def test_the_mended_run_has_nothing_wrong(executed: Any, committed: Any) -> None:
    for notebook in (executed, committed):
        assert _text(_outputs(notebook)["mended.first_nan()"]).startswith("No NaN or Inf that matters in 60 steps")


def test_the_two_runs_are_checked_and_compared(executed: Any, committed: Any) -> None:
    for notebook in (executed, committed):
        outputs = _outputs(notebook)
        assert "rules over 60 steps, 9 modules" in _text(outputs["run.check()"])
        difference = _text(outputs["run.diff(mended)"])
        assert "EuclideanDistance in A, SafeDistance in B" in difference
        assert re.search(r"^distance +\d.* nan +\d+ +0$", difference, flags=re.MULTILINE)
