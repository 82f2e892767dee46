"""A script that takes hold of all that its process has runs as without a recording, and what it saves is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.running import SCRIPTS, verdict_on

LOAD = """
import sys
class NoGradtrace:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gradtrace":
            raise AssertionError("a checkpoint needs gradtrace")
sys.meta_path.insert(0, NoGradtrace())
import pickle, torch
model, optimizer, schedule = torch.load("saved/all.pt", weights_only=False)
torch.load("saved/model.pt", weights_only=False)(torch.ones(1, 4)).sum().backward()
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
print(len(pickle.load(open("saved/pickled.pkl", "rb"))))
"""


def run(folder: Path, *command: str, end: str = "signal") -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    arguments = [str(SCRIPTS / "fighting.py"), "saved", end]
    return subprocess.run(
        [sys.executable, *command, *arguments], cwd=folder, capture_output=True, text=True, timeout=240
    )


def without_own_lines(text: str) -> list[str]:
    """Return the lines that are not gradtrace's, without what an extension lists in any order that it has not freed."""
    return [line for line in text.splitlines() if not line.startswith(("gradtrace: ", "nanobind: ", " - "))]


@pytest.mark.parametrize(
    ("flags", "mode", "end", "code"),
    [(["-OO", "-W", "ignore"], "--full", "signal", 3), (["-I"], "--watch", "error", 1)],
    ids=["optimized", "isolated"],
)
def test_a_script_that_takes_hold_of_everything_runs_as_without_a_recording(
    flags: list[str], mode: str, end: str, code: int, tmp_path: Path
) -> None:
    plain = run(tmp_path / "plain", *flags, end=end)
    recorded = run(tmp_path / "recorded", *flags, "-m", "gradtrace", "record", mode, end=end)
    assert plain.returncode == code, plain.stderr
    assert recorded.returncode == code, recorded.stderr
    assert recorded.stdout == plain.stdout
    assert without_own_lines(recorded.stderr) == without_own_lines(plain.stderr)
    assert ("SIGTERM: saved 4" in plain.stdout, "excepthook: ValueError" in plain.stderr) == (code == 3, code == 1)
    assert "in _wrapped_call_impl" in plain.stdout, "anomaly detection has shown the forward call"
    own = [line for line in recorded.stderr.splitlines() if line.startswith("gradtrace: ")]
    assert any("not finite" in line for line in own)
    assert any("wrote run.parquet" in line for line in own)
    for file in (tmp_path / "plain" / "saved").iterdir():
        data = (tmp_path / "recorded" / "saved" / file.name).read_bytes()
        assert data == file.read_bytes(), file.name
        assert b"gradtrace" not in data
    verdict = verdict_on(tmp_path / "recorded")
    assert verdict["run"]["end"] == ("exit 3" if code == 3 else "exception ValueError")


def test_checkpoints_of_a_recorded_run_load_where_there_is_no_gradtrace(tmp_path: Path) -> None:
    run(tmp_path / "recorded", "-m", "gradtrace", "record", "-q")
    done = subprocess.run(
        [sys.executable, "-c", LOAD], cwd=tmp_path / "recorded", capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize(
    ("script", "flags", "incidents"),
    [
        ("odd_interpreter.py", ["-X", "dev", "-W", "error"], 0),
        ("spawns.py", [], 0),
        ("without_stderr.py", [], 2),
    ],
)
def test_what_a_script_does_to_its_interpreter_and_processes_is_the_same(
    script: str, flags: list[str], incidents: int, tmp_path: Path
) -> None:
    def run(name: str, *command: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).mkdir()
        return subprocess.run(
            [sys.executable, *flags, *command, str(SCRIPTS / script)],
            cwd=tmp_path / name,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )

    plain, recorded = run("plain"), run("recorded", "-m", "gradtrace", "record")
    assert plain.returncode == 0, plain.stderr
    assert (recorded.returncode, recorded.stdout) == (0, plain.stdout), recorded.stderr
    assert without_own_lines(recorded.stderr) == without_own_lines(plain.stderr)
    verdict = verdict_on(tmp_path / "recorded")
    assert verdict["run"]["end"] == "completed"
    assert len(verdict["incidents"]) == incidents
