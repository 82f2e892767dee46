"""``gradtrace recheck``: four lines, exit codes, JSON, and whose the streams are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradtrace.capture.recheck.capsule import save
from tests.failing_step import failing_step

SCRIPTS = Path(__file__).parent.parent / "scripts" / "recheck"
COMMAND = (sys.executable, "-m", "gradtrace", "recheck")


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capsule") / "run.capsule.pt"
    save(path, failing_step(SCRIPTS / "labels.py", "loss"), 2**30)
    return path


def recheck(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_a_mended_script_gives_four_finite_lines_and_exit_code_0(capsule: Path) -> None:
    done = recheck(capsule, SCRIPTS / "labels.py", "--mended")
    assert done.stdout.splitlines() == [
        "input      finite",
        "forward    finite",
        "loss       finite",
        "gradients  finite",
    ]
    assert (done.returncode, done.stderr) == (0, "gradtrace: note: captured: loss\n")


def test_a_script_that_still_fails_exits_with_1_and_names_what_is_not_finite(capsule: Path) -> None:
    done = recheck(capsule, SCRIPTS / "labels.py")
    assert done.stdout.splitlines()[2] == "loss       not finite: nan"
    assert done.returncode == 1


def test_json_is_all_of_stdout_whatever_the_script_prints(capsule: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('from the script')\n" + (SCRIPTS / "labels.py").read_text())
    done = recheck("--json", capsule, script)
    found = json.loads(done.stdout)
    assert list(found) == [
        "ok", "step", "failed", "input", "forward", "loss", "gradients", "complete", "notes",
    ]  # fmt: skip
    finite = {"status": "finite", "boundary": None, "reason": None, "op": None, "location": None, "message": None}
    assert found["forward"] == finite
    assert found["loss"] == {**finite, "status": "not finite", "boundary": "nan"}
    assert (found["ok"], found["step"], found["failed"], found["notes"]) == (False, 4, "loss", [])
    assert done.stderr == "from the script\n"
    assert done.returncode == 1


def test_a_module_is_run_like_python_m(capsule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "labels_module.py").write_text((SCRIPTS / "labels.py").read_text())
    monkeypatch.chdir(tmp_path)
    done = recheck("-m", capsule, "labels_module", "--mended")
    assert (done.returncode, done.stdout.count(" finite")) == (0, 4)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "missing argument 'CAPSULE'; see: gradtrace recheck --help"),
        (("run.capsule.pt",), 2, "missing argument 'SCRIPT'; see: gradtrace recheck --help"),
        (("nothing.pt", "train.py"), 3, "no such capsule: nothing.pt"),
        (("train.py", "train.py"), 3, "train.py is no capsule of gradtrace"),
        (("run.capsule.pt", "nowhere.py"), 2, "no such script: nowhere.py"),
        (("run.capsule.pt", "train.py"), 3, "train.py ended before it imported torch"),
        (
            ("--frobnicate", "run.capsule.pt", "train.py"),
            2,
            "no such option: --frobnicate; see: gradtrace recheck --help",
        ),
    ],
)
def test_bad_input_is_one_line(
    capsule: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "run.capsule.pt").symlink_to(capsule)
    monkeypatch.chdir(tmp_path)
    done = recheck(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"gradtrace: error: {words}\n")
