"""The capsule's file: what it holds, who may read it, how large it is, and what cannot be put into it."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import stat
import sys
from collections import UserDict, namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradtrace.capture.names import Root
from gradtrace.capture.recheck.batches import LoaderFacts, Yielded
from gradtrace.capture.recheck.capsule import FORMAT, Capsule, capsule_path, load, save
from gradtrace.capture.recheck.contents import capsule_of, restore_rng
from gradtrace.capture.recheck.plain import rebuild, structure, to_plain
from gradtrace.capture.recheck.storages import compact, stored_bytes
from gradtrace.capture.replay.rng import Rng
from gradtrace.errors import CapsuleError, RunNotFoundError
from tests.failing_step import HandKept, keep

GIB = 2**30
Point = namedtuple("Point", "x y")


class Encoding(UserDict[str, Any]):
    pass


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x)) * self.mask


def a_capsule(kept: HandKept, **changes: Any) -> Capsule:
    facts: dict[str, Any] = {
        "step": 3,
        "micro_step": 1,
        "boundary": "step 3, backward",
        "phase": "backward",
        "number": 0,
    }
    return capsule_of(kept, **{**facts, **changes})


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(4, 3, requires_grad=True)
    kept = keep(model, x, scale=2.5)
    model(x).sum().backward()  # the running statistics move on; the capsule has those from before
    kept.gradients["0"] = torch.full((4, 2), float("nan"))
    yielded = Yielded([x.detach(), ["a", "b", "c", "d"]], LoaderFacts(0, "Data", "list[float32 2-d, list[str]]"))
    model.norm.eval()
    path = tmp_path / "run.capsule.pt"

    size = save(path, a_capsule(kept, yielded=yielded, loss=float("inf"), loss_seen=True), GIB)

    assert size == path.stat().st_size
    read = load(path)
    assert (read.step, read.micro_step, read.boundary) == (3, 1, "step 3, backward")
    assert (read.loss, read.loss_seen, read.kwargs) == (float("inf"), True, {"scale": 2.5})
    assert read.torch_version == torch.__version__
    assert torch.equal(read.args[0], x) and read.args[0].requires_grad
    assert torch.equal(read.batch[0], x) and not read.batch[0].requires_grad
    assert read.batch[1] == ["a", "b", "c", "d"]
    assert read.loader == yielded.loader
    assert read.gradients["0"].isnan().all()
    assert read.autocast == [("cpu", False, "torch.bfloat16")]
    root = read.root
    assert (root.label, root.kind) == ("model", f"{__name__}.Model")
    assert list(root.weights) == ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    assert torch.equal(root.weights["linear.weight"], model.linear.weight)
    assert root.buffers["norm.running_mean"].tolist() == [0.0, 0.0, 0.0]
    assert root.buffers["norm.num_batches_tracked"].item() == 0
    assert list(root.hidden) == ["mask"]
    assert root.training == {"": True, "norm": False, "linear": True}


def test_the_file_holds_plain_data_that_torch_alone_can_read(tmp_path: Path) -> None:
    path = tmp_path / "run.capsule.pt"
    save(path, a_capsule(keep(Model(), torch.ones(2, 3))), GIB)
    document = torch.load(path, weights_only=True)
    assert document["format"] == FORMAT
    assert type(document["models"]) is list and type(document["models"][0]) is dict


def test_other_roots_are_in_it_and_those_with_nothing_to_load_are_not() -> None:
    generator, discriminator, loss = nn.Linear(2, 2), nn.Linear(2, 1), nn.MSELoss()
    roots = [Root(generator, "g", "g"), Root(discriminator, "d", "d"), Root(loss, "criterion", "criterion")]
    kept = keep(discriminator, torch.ones(1, 2))
    kept.entry.root = roots[1]
    capsule = a_capsule(kept, roots=roots)
    assert [state.label for state in capsule.models] == ["d", "g"]
    of_criterion = keep(loss, torch.ones(1, 2), torch.ones(1, 2), label="criterion")
    assert [state.label for state in a_capsule(of_criterion, roots=roots[:2]).models] == ["criterion", "g", "d"]


def test_nobody_else_may_read_it_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    written = torch.save

    def spy(document: Any, file: Any) -> None:
        (unfinished,) = tmp_path.iterdir()
        modes.append(stat.S_IMODE(unfinished.stat().st_mode))
        written(document, file)

    monkeypatch.setattr(torch, "save", spy)
    path = tmp_path / "run.capsule.pt"
    mask = os.umask(0)
    try:
        save(path, a_capsule(keep(Model())), GIB)
    finally:
        os.umask(mask)
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_disk_that_takes_no_more_is_the_error_and_not_what_torch_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves_as_torch_does(document: Any, file: Any) -> None:
        try:
            file.write(bytes(100_000))
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 9344 vs 9238") from None

    monkeypatch.setattr(torch, "save", saves_as_torch_does)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / "run.capsule.pt", a_capsule(keep(Model())), GIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing_and_keeps_the_older_capsule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.capsule.pt"
    path.write_bytes(b"older")

    def full(document: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"No space"):
        save(path, a_capsule(keep(Model())), GIB)
    assert [p.name for p in tmp_path.iterdir()] == ["run.capsule.pt"]
    assert path.read_bytes() == b"older"


def test_above_the_limit_nothing_is_copied_and_no_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capsule = a_capsule(keep(nn.Linear(256, 256, bias=False)))
    monkeypatch.setattr(torch.Tensor, "clone", None)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    with pytest.raises(CapsuleError, match=r"^the step takes 2\d\d KiB, more than the limit of 200 KiB$"):
        save(tmp_path / "run.capsule.pt", capsule, 200 * 1024)
    assert not list(tmp_path.iterdir())


def test_size_counts_what_is_shared_once_and_of_a_view_what_it_shows() -> None:
    table = torch.zeros(1000, 10)
    assert stored_bytes([table, table.view(10, 1000), table.t()]) == 40_000
    assert stored_bytes([table[3], table[3], table[4]]) == 80
    assert stored_bytes(table[:1].expand(500, 10)) == 40
    assert stored_bytes({"a": torch.zeros(()), "b": [torch.zeros(0), torch.zeros(2, 0).expand(2, 0)]}) == 4


def test_a_row_of_a_large_table_does_not_bring_the_table() -> None:
    table = torch.arange(20_000.0).view(1000, 20)
    row, expanded = compact((table[7], table[7:8].expand(5, 20)))
    assert row.untyped_storage().nbytes() == expanded.untyped_storage().nbytes() == 80
    assert row.tolist() == table[7].tolist()
    assert expanded.shape == (5, 20) and expanded.stride() == (0, 1)
    assert torch.equal(expanded, table[7:8].expand(5, 20))


def test_compact_tensors_stay_what_they_are() -> None:
    whole = torch.randn(4, 6, dtype=torch.complex64)
    values = [
        whole,
        whole.t(),
        to_plain(whole.conj(), "x"),
        torch.randn(2, 3).to(torch.bfloat16).requires_grad_(),
        torch.tensor(7),
        torch.zeros(3, 0),
        torch.arange(10).as_strided((4, 4), (2, 1)),
        torch.ones(1).expand(3),
    ]
    for value, saved in zip(values, compact(values), strict=True):
        assert torch.equal(saved, value.resolve_conj())
        assert (saved.dtype, saved.stride(), saved.requires_grad) == (value.dtype, value.stride(), value.requires_grad)
    part = torch.randn(3, 4)[:, 1:3]
    assert torch.equal(compact(part), part)
    first, again, transposed = compact([whole, whole, whole.t()])
    assert first.data_ptr() == again.data_ptr() == transposed.data_ptr()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(2), "argument 0.data is of type numpy.ndarray"),
        (np.float64(1), "argument 0.data is of type numpy.float64"),
        ({1, 2}, "argument 0.data is of type set"),
        (Path("."), "argument 0.data is of type pathlib"),
        (torch.zeros(2).to_sparse(), "argument 0.data is a sparse_coo tensor"),
        (torch.zeros(2, device="meta"), "argument 0.data is a meta tensor"),
        ({(1, 2): 3}, "argument 0.data has a key of type tuple"),
        (nn.Buffer(torch.zeros(2)).as_subclass(type("Mine", (torch.Tensor,), {})), "argument 0.data is of type .*Mine"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_its_type(value: Any, words: str) -> None:
    with pytest.raises(CapsuleError, match=words):
        a_capsule(keep(Model(), {"data": value}))


def test_a_container_in_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CapsuleError, match=r"argument 0.*nested more than 12 deep"):
        a_capsule(keep(Model(), endless))


@pytest.mark.parametrize(
    "batch",
    [
        {"ids": torch.arange(4), "names": ["a", "b"]},
        Point(torch.ones(2), (torch.zeros(1), None)),
        Encoding(ids=torch.arange(4)),
        Sample(torch.ones(2), "cat"),
        [torch.ones(2), torch.float16, torch.Size([2, 3]), torch.device("cpu"), True, 1.5],
    ],
)
def test_a_batch_comes_back_as_what_its_template_is(batch: Any, tmp_path: Path) -> None:
    torch.save(to_plain(batch, "batch"), tmp_path / "x")
    plain = torch.load(tmp_path / "x", weights_only=True)
    new = rebuild(batch, plain)
    assert type(new) is type(batch)
    assert structure(new) == structure(batch)
    assert str(to_plain(new, "x")) == str(plain)


def test_a_rebuilt_batch_is_a_copy() -> None:
    plain = {"x": torch.zeros(2)}
    rebuild({"x": torch.ones(2)}, plain)["x"].add_(1)
    assert plain["x"].tolist() == [0.0, 0.0]


def test_structure_tells_batches_apart_but_not_sizes() -> None:
    assert structure([torch.ones(4, 3), torch.ones(4).long()]) == structure([torch.ones(2, 3), torch.ones(2).long()])
    assert structure(["a", "b"]) == structure(["c"]) == "list[str]"
    assert structure({"x": torch.ones(2)}) != structure({"y": torch.ones(2)})
    assert structure(torch.ones(2)) != structure(torch.ones(2, 1))
    assert structure(torch.ones(2)) != structure(torch.ones(2).half())


def test_generators_go_on_as_they_would_have(tmp_path: Path) -> None:
    np.random.seed(1)  # the first use of it loads it
    kept = keep(Model())
    expected = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    save(tmp_path / "c", a_capsule(kept), GIB)
    restore_rng(load(tmp_path / "c").rng)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == expected


def test_a_capsule_that_knows_numpy_is_restored_without_it() -> None:
    state = a_capsule(keep(Model())).rng
    expected = torch.rand(1)
    rng = dataclasses.replace(Rng.now(), numpy=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rng, "now", classmethod(lambda cls: rng))
        restore_rng(state)
    assert torch.equal(torch.rand(1), expected)


def test_the_capsule_is_beside_the_run() -> None:
    assert capsule_path("out/run.parquet") == Path("out/run.capsule.pt")
    assert capsule_path("out/run") == Path("out/run.capsule.pt")
    assert capsule_path("run.parquet", 1, 4) == Path("run.parquet/rank-1.capsule.pt")
    assert capsule_path("run.parquet", 1, 4, 2) == Path("run.parquet/rank-1.attempt-2.capsule.pt")


def test_a_file_that_is_no_capsule_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"^no such capsule: .*nothing$"):
        load(tmp_path / "nothing")
    for name, content in (("text", b"hello"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CapsuleError, match=f"{name} is no capsule of gradtrace$"):
            load(tmp_path / name)
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(CapsuleError, match=r"weights.pt is no capsule of gradtrace$"):
        load(tmp_path / "weights.pt")


def test_a_newer_capsule_names_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "run.capsule.pt"
    save(path, a_capsule(keep(Model())), GIB)
    document = torch.load(path, weights_only=True)
    torch.save({**document, "format": 9, "gradtrace_version": "7.0"}, path)
    with pytest.raises(CapsuleError, match=r"capsule format 9 \(gradtrace 7.0\); this gradtrace reads up to 1"):
        load(path)
    torch.save({**document, "torch_version": "9.1.0", "args": (Sample(torch.ones(1), "x"),)}, path)
    with pytest.raises(CapsuleError, match=r"written with torch 9.1.0, which torch .* cannot read .*: upgrade torch"):
        load(path)


def test_a_directory_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(CapsuleError, match=r"cannot be read: Is a directory"):
        load(tmp_path)


def test_a_truncated_capsule_is_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "run.capsule.pt"
    save(path, a_capsule(keep(Model())), GIB)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CapsuleError, match=r"is no capsule of gradtrace"):
        load(path)


def test_numpys_generator_is_left_out_where_its_import_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(0)  # it is imported when it is first used
    assert Rng.now().numpy is not None
    monkeypatch.setitem(sys.modules, "numpy.random.mtrand", ModuleType("numpy.random.mtrand"))
    assert Rng.now().numpy is None
    monkeypatch.delitem(sys.modules, "numpy.random.mtrand")
    assert Rng.now().numpy is None
