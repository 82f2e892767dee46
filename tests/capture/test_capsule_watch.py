"""Which call, batch and loss become the capsule of a run's first incident, and what is said of it."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradtrace.capture.names import ModuleEntry
from gradtrace.capture.recheck.capsule import load
from gradtrace.capture.recheck.capsule_watch import CapsuleWatch
from gradtrace.capture.rows import Row
from gradtrace.capture.session import Session
from tests.failing_step import HandKept, a_session, keep

NAN = float("nan")


@pytest.fixture
def session() -> Session:
    return a_session()


@pytest.fixture
def watch(session: Session, tmp_path: Path) -> Iterator[CapsuleWatch]:
    watch = CapsuleWatch(session, lambda: tmp_path / "run.capsule.pt")
    watch.batches.install()
    yield watch
    watch.batches.remove()


def row_of(session: Session, tensor: str, value: Tensor, entry: ModuleEntry | None = None, phase: str = "loss") -> Row:
    session.record(phase, entry, tensor, "0" if entry else "", value)
    (row,) = session.rows.take()
    return row


def called(watch: CapsuleWatch, label: str, x: Tensor, *, reached: bool = True) -> HandKept:
    kept = keep(nn.Linear(2, 2), x, label=label)
    watch.call_begins(kept)
    if reached:
        kept.gradients["0"] = torch.ones(1, 2)
    return kept


def test_with_a_batch_it_is_the_first_call_that_gradients_reach(
    session: Session, watch: CapsuleWatch, tmp_path: Path
) -> None:
    (x,) = next(iter(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)))
    calls = [called(watch, "teacher", x, reached=False), called(watch, "encoder", x), called(watch, "decoder", x * 2)]
    session.clock.step = 7
    loss = row_of(session, "loss", torch.tensor(float("-inf")))
    said = watch.incident(calls, loss, [loss])
    path = tmp_path / "run.capsule.pt"
    assert said is not None
    assert said.startswith(f"the failing step is saved beside the run in {path.name} (")
    assert said.endswith(" KiB); after the mend: gradtrace recheck run.capsule.pt SCRIPT")
    capsule = load(path)
    assert (capsule.step, capsule.phase, capsule.boundary) == (7, "loss", "step 7, loss")
    assert (capsule.root.label, capsule.number) == ("encoder", 0)
    assert (capsule.loss, capsule.loss_seen) == (float("-inf"), True)
    assert torch.equal(capsule.batch[0], x)


def test_without_a_batch_it_is_the_call_that_failed(session: Session, watch: CapsuleWatch, tmp_path: Path) -> None:
    calls = [called(watch, label, torch.ones(1, 2)) for label in ("encoder", "decoder", "critic")]
    bad = row_of(session, "output", torch.tensor([NAN, 1.0]), calls[1].entry, "forward")
    watch.incident(calls, bad, [bad])
    capsule = load(tmp_path / "run.capsule.pt")
    assert (capsule.root.label, capsule.loader, capsule.loss, capsule.loss_seen) == ("decoder", None, None, False)
    assert capsule.boundary == "step 0, forward, decoder, output 0"


def test_a_loss_that_failed_without_a_batch_is_the_last_call_s(
    session: Session, watch: CapsuleWatch, tmp_path: Path
) -> None:
    calls = [called(watch, label, torch.ones(1, 2)) for label in ("encoder", "decoder")]
    loss = row_of(session, "loss", torch.tensor(NAN))
    watch.incident(calls, loss, [loss])
    assert load(tmp_path / "run.capsule.pt").root.label == "decoder"


def test_a_call_is_numbered_from_the_batch_on(session: Session, watch: CapsuleWatch, tmp_path: Path) -> None:
    critic = nn.Linear(2, 2)
    iterator = iter(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    next(iterator)
    first = keep(critic, torch.ones(1, 2), label="critic")
    watch.call_begins(first)
    watch.step_ended()
    next(iterator)
    watch.call_begins(first)
    second = HandKept(first.entry, critic, first.args)
    watch.call_begins(second)
    loss = row_of(session, "loss", torch.tensor(NAN))
    watch.incident([second], loss, [loss])
    assert load(tmp_path / "run.capsule.pt").number == 1


def test_only_the_first_incident_is_saved(session: Session, watch: CapsuleWatch, tmp_path: Path) -> None:
    loss = row_of(session, "loss", torch.tensor(NAN))
    assert watch.incident([called(watch, "model", torch.ones(1, 2))], loss, [loss]) is not None
    (tmp_path / "run.capsule.pt").unlink()
    assert watch.incident([called(watch, "model", torch.ones(1, 2))], loss, [loss]) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "limit", "place", "words"),
    [
        (np.ones(2), 2**30, "c.pt", "argument 0 is of type numpy.ndarray, which no capsule can hold"),
        (
            torch.ones(1000),
            100,
            "c.pt",
            "the step takes 8.87 KiB, more than the limit of 100 bytes",
        ),  # 4000, weights 24, rng 5056
        (torch.ones(1), 2**30, "nowhere/c.pt", "the directory is gone: removed, moved or replaced"),
    ],
)
def test_what_is_in_the_way_is_said_and_not_raised(
    session: Session, tmp_path: Path, argument: Any, limit: int, place: str, words: str
) -> None:
    watch = CapsuleWatch(session, lambda: tmp_path / place, limit)
    loss = row_of(session, "loss", torch.tensor(NAN))
    kept = keep(nn.Linear(2, 2), argument)
    said = watch.incident([kept], loss, [loss])
    assert said is not None and said.startswith(f"no capsule is saved: {words}")
    assert not list(tmp_path.iterdir())


def test_a_capsule_that_the_disk_does_not_take_is_said_in_words(
    session: Session, watch: CapsuleWatch, tmp_path: Path
) -> None:
    """torch has words of its own for a write that the kernel refuses, which name neither the disk nor why."""
    loss = row_of(session, "loss", torch.tensor(NAN))
    kept = called(watch, "model", torch.ones(1, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        said = watch.incident([kept], loss, [loss])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert said == "no capsule is saved: a file has reached the largest size that is allowed (ulimit -f)"
    assert not list(tmp_path.iterdir())


def test_running_out_of_memory_is_said(session: Session, watch: CapsuleWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise torch.OutOfMemoryError("out of memory\nTried to allocate")

    monkeypatch.setattr("gradtrace.capture.recheck.capsule_watch.save", full)
    loss = row_of(session, "loss", torch.tensor(NAN))
    said = watch.incident([called(watch, "model", torch.ones(1, 2))], loss, [loss])
    assert said == "no capsule is saved: out of memory"


def test_without_a_kept_call_there_is_none(session: Session, watch: CapsuleWatch) -> None:
    loss = row_of(session, "loss", torch.tensor(NAN))
    assert watch.incident([], loss, [loss]) == "no capsule is saved: no call of the model in grad mode was kept"
