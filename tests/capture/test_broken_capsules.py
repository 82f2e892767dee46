"""Capsules that are none, that are damaged, and that are made to run code: nothing in one is ever run."""

from __future__ import annotations

import ast
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gradtrace_cli.main import main
from hypothesis import HealthCheck, given, settings
from torch import nn

import gradtrace
from gradtrace.capture.recheck.capsule import load, save
from gradtrace.capture.recheck.contents import capsule_of
from gradtrace.errors import CapsuleError
from tests.broken import Mutation, mutated, mutations
from tests.failing_step import keep

PACKAGES = [Path(gradtrace.__file__).parent, Path(__file__).parents[2] / "cli"]


@pytest.fixture(scope="module")
def capsule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capsule of a small step."""
    path = tmp_path_factory.mktemp("capsule") / "run.capsule.pt"
    facts: dict[str, Any] = {"step": 3, "micro_step": 0, "boundary": "", "phase": "backward", "number": 0}
    save(path, capsule_of(keep(nn.Linear(3, 2), torch.randn(4, 3)), **facts), 2**30)
    return path


class Exploit:
    """Makes a file where it is unpickled as plain pickles are."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _document(capsule: Path) -> dict[str, Any]:
    document: dict[str, Any] = torch.load(capsule, weights_only=True)
    return document


def _as_pickle(capsule: Path, exploit: Exploit, path: Path) -> None:
    path.write_bytes(pickle.dumps(exploit))


def _as_torch_saves(capsule: Path, exploit: Exploit, path: Path) -> None:
    torch.save(exploit, path)


def _in_the_old_format(capsule: Path, exploit: Exploit, path: Path) -> None:
    torch.save({**_document(capsule), "batch": exploit}, path, _use_new_zipfile_serialization=False)


def _within_a_capsule(capsule: Path, exploit: Exploit, path: Path) -> None:
    torch.save({**_document(capsule), "batch": [exploit]}, path)


def _instead_of_its_pickle(capsule: Path, exploit: Exploit, path: Path) -> None:
    with zipfile.ZipFile(capsule) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickle.dumps(exploit) if name.endswith("data.pkl") else old.read(name))


def _as_a_key(capsule: Path, exploit: Exploit, path: Path) -> None:
    torch.save({**_document(capsule), "rng": {"cpu": exploit}}, path)


EXPLOITS = [
    _as_pickle,
    _as_torch_saves,
    _in_the_old_format,
    _within_a_capsule,
    _instead_of_its_pickle,
    _as_a_key,
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", EXPLOITS, ids=lambda make: make.__name__.strip("_"))
def test_a_capsule_that_would_run_code_is_refused_and_runs_none(
    tmp_path: Path, capsule: Path, make: Callable[[Path, Exploit, Path], None]
) -> None:
    mark, path = tmp_path / "run", tmp_path / "run.capsule.pt"
    make(capsule, Exploit(mark), path)
    with pytest.raises(CapsuleError) as error:
        load(path)
    assert str(error.value).startswith(f"{path} ") and "`weights_only` set to `False`" not in str(error.value)
    assert not mark.exists()
    if make in (_within_a_capsule, _as_a_key):
        words = (
            "holds what no capsule does, and nothing of it was loaded: Trying to load unsupported GLOBAL posix.mkdir"
        )
        assert words in str(error.value)
    # It would have: this is what an unpickler does with it that allows everything.
    if make is _as_pickle:
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert mark.exists()


def test_a_capsule_in_a_capsule_is_bytes(tmp_path: Path, capsule: Path) -> None:
    """A file that is a whole capsule, exploit and all, inside of the zip is not even looked at."""
    mark, path = tmp_path / "run", tmp_path / "run.capsule.pt"
    inner = io.BytesIO()
    torch.save(Exploit(mark), inner)
    with zipfile.ZipFile(capsule) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr(f"{old.namelist()[0].split('/')[0]}/data/inner.pt", inner.getvalue())
    assert load(path).step == 3
    assert not mark.exists()


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if not re.search("load|pickle|eval", text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
                    yield ast.unparse(node.func), node


def test_nothing_in_the_package_unpickles_anything_but_with_weights_only() -> None:
    loads = [call for name, call in _calls() if name in ("torch.load", "load") and call.args and call.keywords]
    assert loads, "the capsule's own"
    for call in loads:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        assert isinstance(given["weights_only"], ast.Constant) and given["weights_only"].value is True
    names = {name for name, _ in _calls()}
    assert "torch.load" in names
    assert not names & {"pickle.load", "pickle.loads", "marshal.loads", "torch.jit.load", "torch.hub.load", "eval"}
    assert not any(name.endswith((".Unpickler", ".unpickle", "Unpickler", "read_pickle")) for name in names)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(how=mutations())
def test_a_broken_capsule_is_refused_or_the_same(tmp_path: Path, capsule: Path, how: Mutation) -> None:
    path = tmp_path / "broken.capsule.pt"
    path.write_bytes(mutated(capsule.read_bytes(), how))
    try:
        read = load(path)
    except CapsuleError as error:
        assert str(error).startswith(str(path)) and str(error).isprintable()
        return
    whole = load(capsule)
    assert (read.step, read.phase, read.boundary) == (whole.step, whole.phase, whole.boundary)
    for name, weight in whole.root.weights.items():
        assert torch.equal(read.root.weights[name], weight)
    assert torch.equal(read.args[0], whole.args[0])


def test_a_changed_weight_is_seen(tmp_path: Path, capsule: Path) -> None:
    """torch itself does not compare a file with its checksums."""
    path = tmp_path / "changed.capsule.pt"
    weight = load(capsule).root.weights["weight"].detach()
    held, data = weight.numpy().tobytes(), capsule.read_bytes()
    assert data.count(held) == 1
    path.write_bytes(data.replace(held, bytes([held[0] ^ 1]) + held[1:]))
    assert not torch.equal(_document(path)["models"][0]["weights"]["weight"], weight)
    with pytest.raises(CapsuleError, match=r"is damaged: .*/data/\d+ in it is not what was written; copy it again$"):
        load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "3"}, "its step is not what it should be"),
        ({"models": []}, "it has no model"),
        ({"models": [{"label": "a"}]}, "it has no kind"),
        ({"models": 5}, "its models is not what it should be"),
        ({"gradients": {"0": 1.0}}, "its gradients is not what it should be"),
        ({"args": [torch.ones(1)]}, "its args is not what it should be"),
        ({"loader": {"number": 1}}, "it has no dataset"),
        ({"autocast": [("cpu", 1)]}, "its autocast is not what it should be"),
        ({"loss": "nan"}, "its loss is not what it should be"),
        ({"format": 0.5}, "its format is 0.5"),
    ],
)
def test_a_capsule_of_another_structure(
    tmp_path: Path, capsule: Path, change: dict[str, Any], words: str | None
) -> None:
    path = tmp_path / "other.capsule.pt"
    torch.save(_document(capsule) | change, path)
    with pytest.raises(CapsuleError) as error:
        load(path)
    assert str(error.value) == f"{path} is a damaged capsule: {words}; record the failing step again"


def test_a_capsule_without_one_of_its_fields(tmp_path: Path, capsule: Path) -> None:
    path = tmp_path / "other.capsule.pt"
    for name in _document(capsule).keys() - {"mark", "format"}:
        torch.save({key: value for key, value in _document(capsule).items() if key != name}, path)
        with pytest.raises(CapsuleError, match=f"is a damaged capsule: it has no {name};"):
            load(path)


@pytest.mark.timeout(60)
def test_recheck_refuses_what_is_no_file_without_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('never run')")
    pipe = tmp_path / "pipe.capsule.pt"
    os.mkfifo(pipe)
    for path, words in (
        (pipe, "is no file"),
        (tmp_path, "is no file"),
        (Path("/dev/zero"), "is no file"),
        (script, "is no capsule of gradtrace"),
    ):
        assert main(["recheck", str(path), str(script)]) == 3
        assert capsys.readouterr() == ("", f"gradtrace: error: {path} {words}\n")
