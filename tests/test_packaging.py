"""What a user installs: the wheel holds every file of both packages and nothing else, and runs on its own.

"On its own" is an environment of its own, another folder and another home, without a network.
"""

from __future__ import annotations

import email
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from documentation import DOCS, blocks_of
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = {"gradtrace": "gradtrace", "cli": "gradtrace_cli"}


GUARD = """
import os, sys

HOME = os.environ.get("GUARDED_HOME")
NETWORK = {"connect", "bind", "sendto", "getaddrinfo", "gethostbyname", "gethostbyaddr"}

def guard(event, arguments):
    if event.startswith("socket.") and event.partition(".")[2] in NETWORK:
        os.write(2, f"GUARD: {event} {arguments}".encode())
        os._exit(99)
    if event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((os.path.dirname(HOME) + os.sep, "/dev/")):
            os.write(2, f"GUARD: writes {path}".encode())
            os._exit(99)

if HOME:
    sys.addaudithook(guard)
"""
"""Ends the process at a look at the network, and where it writes to a file that is not beside its home."""

ASK = """
import sys
from gradtrace_cli.main import main
for arguments in sys.argv[1:]:
    sys.stderr.write(f"{arguments}: {main(arguments.split(';'))}\\n")
assert "torch" not in sys.modules
"""


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = _done(*command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _done(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built from."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it, without a network."""
    dist = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=dist)
    return dist


def _environment(built: Path, home: Path) -> tuple[Path, Path]:
    """Make an environment with the wheel alone; return its folders of scripts and of packages."""
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    pip = (sys.executable, "-m", "pip", "--python", python)
    _run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=home)
    packages = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (packages / "guard_of_test.py").write_text(GUARD)
    (packages / "guard_of_test.pth").write_text("import guard_of_test\n")
    return home / "bin", packages


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that has the wheel, and the dependencies of the running Python."""
    scripts, packages = _environment(built, tmp_path_factory.mktemp("environment"))
    # A plain path: the .pth files that lie there, an editable install's among them, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    return scripts


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one that has the wheel and what it says it needs, nothing else: no torch and no numpy."""
    scripts, packages = _environment(built, tmp_path_factory.mktemp("bare"))
    for needed in _closure(metadata.Distribution.at(next(packages.glob("gradtrace-*.dist-info"))).requires):
        for top in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(str(needed.locate_file(top)))
    return scripts


def _closure(requirements: Iterable[str] | None) -> list[metadata.Distribution]:
    """Return all that requirements bring with them, as it is installed here."""
    found: dict[str, metadata.Distribution] = {}
    todo = [Requirement(text) for text in requirements or ()]
    while todo:
        needed = todo.pop()
        if needed.name in found or (needed.marker is not None and not needed.marker.evaluate({"extra": ""})):
            continue
        found[needed.name] = metadata.distribution(needed.name)
        todo += [Requirement(text) for text in found[needed.name].requires or ()]
    return list(found.values())


@pytest.fixture(scope="module")
def quick_start(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which a stranger recorded the training of the quick start, with the installed command."""
    work = tmp_path_factory.mktemp("stranger") / "work"
    work.mkdir()
    (work / "train.py").write_text(blocks_of(DOCS / "quick-start.md", "python")[0])
    done = _done(*_offline(), installed / "gradtrace", "record", "train.py", cwd=work, **_stranger(work))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step  0  loss ")
    assert "gradtrace: wrote run.parquet: 40 steps" in done.stderr
    yield work


def _stranger(work: Path) -> dict[str, str]:
    """Return the environment of another user, whose home is beside ``work`` and who cannot write to packages."""
    home = work.parent / "home"
    home.mkdir(exist_ok=True)
    return {
        "HOME": str(home),
        "GUARDED_HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


@functools.cache
def _offline() -> tuple[str, ...]:
    """Return the command in front of another one that takes its network away, where the system lets one."""
    unshare = ("unshare", "--user", "--map-root-user", "--net")
    allowed = shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    return unshare if allowed else ()  # the guard looks on in any case


def _source_files() -> set[str]:
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_source_file_and_no_other(built: Path, source: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == _source_files()
        for name in names:
            assert wheel.read(name) == (source / name.replace("gradtrace_cli/", "cli/", 1)).read_bytes(), name


def test_the_wheel_has_two_packages_and_the_licence(built: Path) -> None:
    wheel_path = next(built.glob("*.whl"))
    information = "-".join(wheel_path.name.split("-")[:2]) + ".dist-info"
    with zipfile.ZipFile(wheel_path) as wheel:
        assert {name.split("/")[0] for name in wheel.namelist()} == {
            "gradtrace",
            "gradtrace_cli",
            information,
        }
        assert wheel.read(f"{information}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_holds_every_source_file(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {name.replace("gradtrace_cli/", "cli/", 1) for name in _source_files()}
    assert expected | set(BUILT_FROM) <= names


def test_the_installed_command_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    assert "first-nan" in _run(installed / "gradtrace", "--help", cwd=tmp_path)


def test_the_package_runs_as_a_module(installed: Path, tmp_path: Path) -> None:
    assert "first-nan" in _run(installed / "python", "-m", "gradtrace", "--help", cwd=tmp_path)


def test_both_packages_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import gradtrace, gradtrace_cli; print(gradtrace.__file__); print(gradtrace_cli.__file__)"
    files = [Path(line) for line in _run(installed / "python", "-c", code, cwd=tmp_path).splitlines()]
    assert len(files) == 2
    assert all(installed.parent in file.parents for file in files)


def test_no_package_named_cli_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('cli'))"
    assert _run(installed / "python", "-c", code, cwd=tmp_path).strip() == "None"


def test_the_metadata_is_what_an_index_takes(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        facts = email.message_from_bytes(wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))))
    assert (facts["Name"], facts["License-Expression"], facts["License-File"]) == ("gradtrace", "Apache-2.0", "LICENSE")
    assert facts["Description-Content-Type"] == "text/markdown"
    assert facts.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n" not in facts["Summary"]
    needs = [Requirement(text) for text in facts.get_all("Requires-Dist")]
    always = {need.name for need in needs if need.marker is None}
    assert always == {"click", "duckdb", "pyarrow", "rich"}
    assert set(facts.get_all("Provides-Extra")) == {"torch", "report", "tensorboard"}


def test_the_quick_start_is_answered_offline_and_writes_nothing_elsewhere(installed: Path, quick_start: Path) -> None:
    asked = ("first-nan;run.parquet", "summary;run.parquet", "check;run.parquet", "report;run.parquet;-o;r.html")
    query = "sql;run.parquet;SELECT min(step) AS s FROM grads WHERE nan_count > 0;-f;csv"
    command = (*_offline(), installed / "python", "-W", "error", "-c", ASK, *asked, query)
    done = _done(*command, cwd=quick_start, **_stranger(quick_start))
    assert done.returncode == 0, done.stderr
    assert [line.rpartition(": ")[2] for line in done.stderr.splitlines() if "run.parquet: 0" in line or ";" in line]
    assert done.stdout.startswith("First non-finite value: step 25, forward, average (Average), output 0:")
    assert done.stdout.endswith("\ns\n25\n")
    assert {path.name for path in quick_start.iterdir()} == {"train.py", "run.parquet", "run.capsule.pt", "r.html"}


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (("-W", "error", "-X", "dev", "-X", "warn_default_encoding"), {}),
        (("-OO",), {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
)
def test_reading_needs_nothing_but_what_the_wheel_says(
    bare: Path, quick_start: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    asked = (
        "first-nan;run.parquet",
        "summary;run.parquet",
        "check;run.parquet",
        "diff;run.parquet;run.parquet",
        "sql;run.parquet;SELECT count(*) AS n FROM steps;-f;csv",
    )
    command = (*_offline(), bare / "python", *options, "-c", ASK, *asked)
    done = _done(*command, cwd=quick_start, **_stranger(quick_start), **environment)
    assert (done.returncode, done.stderr) == (0, "".join(f"{arguments}: 0\n" for arguments in asked))
    assert done.stdout.startswith("First non-finite value: step 25, forward, average (Average), output 0:")
    assert done.stdout.endswith("\nn\n40\n")


def test_what_needs_more_says_so_in_a_line(bare: Path, quick_start: Path) -> None:
    for arguments, said in [
        (("record", "train.py"), "record needs PyTorch: pip install torch"),
        (("recheck", "run.capsule.pt", "train.py"), "recheck needs PyTorch: pip install torch"),
        (("report", "run.parquet", "-o", "none.html"), "a report needs plotly: pip install 'gradtrace[report]'"),
    ]:
        done = _done(bare / "gradtrace", *arguments, cwd=quick_start, **_stranger(quick_start))
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"gradtrace: error: {said}\n")


def test_what_the_wheel_needs_fits_together(bare: Path, tmp_path: Path) -> None:
    assert _run(sys.executable, "-m", "pip", "--python", bare / "python", "check", cwd=tmp_path).startswith("No broken")
