"""What a user installs: the wheel holds every file of both packages and nothing else, and runs on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = {"gradtrace": "gradtrace", "cli": "gradtrace_cli"}


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel made from it: from a copy of the sources, without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    dist = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=dist)
    return dist


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of an environment that has the wheel, and the dependencies of the running Python."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    scripts = home / "bin"
    python = scripts / "python"
    wheel = next(built.glob("*.whl"))
    _run(
        *(sys.executable, "-m", "pip", "--python", python),
        *("install", "--quiet", "--no-index", "--no-deps", wheel),
        cwd=home,
    )
    packages = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    # A plain path: the .pth files that lie there, an editable install's among them, are not read.
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
    return scripts


def _source_files() -> set[str]:
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_source_file_and_no_other(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {name for name in names if ".dist-info/" not in name} == _source_files()


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
