"""The DataLoader watch: which batch is kept, for how long, and that iteration stays as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gradtrace.capture.recheck.batches import Batches
from tests.failing_step import a_session

ORIGINAL = _BaseDataLoaderIter.__next__


@pytest.fixture
def batches() -> Iterator[Batches]:
    watch = Batches(a_session())
    watch.install()
    yield watch
    watch.remove()
    assert _BaseDataLoaderIter.__next__ is ORIGINAL


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(6.0))


def pairs(count: int = 6) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)), torch.arange(count))


def batch_of(watch: Batches, *args: Any) -> Any:
    yielded = watch.of_call(args, {})
    return None if yielded is None else yielded.batch


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batch_that_is_kept_is_the_object_that_was_yielded(batches: Batches, workers: int) -> None:
    loader = DataLoader(pairs(), batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None)
    seen = []
    for batch in loader:
        assert batch_of(batches, batch[0]) is batch
        seen.append(batch[0].tolist())
    assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_a_dataset_that_is_iterated_and_one_without_batches_are_seen(batches: Batches) -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    (single,) = DataLoader([torch.ones(2)], batch_size=None)
    facts = batches.of_call((single,), {})
    assert facts is not None and facts.batch is single
    assert (facts.loader.number, facts.loader.dataset, facts.loader.structure) == (1, "list", "float32 1-d")


def test_facts_name_the_loader_in_order_of_first_use(batches: Batches) -> None:
    first, second = DataLoader(pairs(), batch_size=2), DataLoader(Numbers(), batch_size=3)
    for _ in range(2):  # another epoch is the same loader
        next(iter(second))
        x, _ = next(iter(first))
        facts = batches.of_call((x,), {})
        assert facts is not None
        assert (facts.loader.number, facts.loader.dataset) == (1, "TensorDataset")
        assert facts.loader.structure == "list[float32 1-d, int64 1-d]"


def test_the_step_s_end_lets_the_batch_go(batches: Batches) -> None:
    iterator = iter(DataLoader(pairs(), batch_size=2))
    tensors = []
    for _ in range(3):
        batch = next(iterator)
        tensors.append(weakref.ref(batch[0]))
        del batch
        gc.collect()
        assert tensors[-1]() is not None
        batches.forget()
        gc.collect()
        assert [reference() for reference in tensors] == [None] * len(tensors)
    assert batch_of(batches) is None


def test_gradient_accumulation_keeps_the_last_batch_only_once_it_is_known(batches: Batches) -> None:
    iterator = iter(DataLoader(pairs(24), batch_size=2))
    for _ in range(2):
        next(iterator), next(iterator)
        batches.forget()
    first, second = next(iterator), next(iterator)
    assert batch_of(batches, second[0]) is second
    held = weakref.ref(first[0])
    del first
    gc.collect()
    assert held() is None
    batches.forget()
    assert batch_of(batches) is None


def test_of_a_loop_that_fetches_ahead_the_batch_is_the_one_that_the_model_got(batches: Batches) -> None:
    iterator = iter(DataLoader(pairs(12), batch_size=2))
    current = next(iterator)
    for _ in range(4):
        ahead = next(iterator)
        copied = current[0].clone()  # as on another device
        assert batch_of(batches, copied) is current
        batches.forget()
        current = ahead


def test_a_batch_that_the_script_changes_on_its_way_is_the_newest(batches: Batches) -> None:
    iterator = iter(DataLoader(pairs(), batch_size=2))
    next(iterator)
    newest = next(iterator)
    assert batch_of(batches, newest[0] + 0.5) is newest


def test_a_batch_with_nan_is_recognised(batches: Batches) -> None:
    data = torch.tensor([[1.0, float("nan")], [3.0, 4.0]])
    iterator = iter(DataLoader(data, batch_size=1))
    first = next(iterator)
    next(iterator)
    assert batch_of(batches, first.clone()) is first


def test_calls_are_counted_from_the_last_batch_on(batches: Batches) -> None:
    iterator = iter(DataLoader(pairs(), batch_size=2))
    next(iterator)
    assert [batches.call_begins("d"), batches.call_begins("g"), batches.call_begins("d")] == [0, 0, 1]
    next(iterator)
    assert batches.call_begins("d") == 0
    batches.forget()
    assert batches.call_begins("d") == 0


def test_an_ended_recording_keeps_nothing() -> None:
    session = a_session()
    watch = Batches(session)
    watch.install()
    try:
        session.active = False
        batch = next(iter(DataLoader(pairs(), batch_size=2)))
        assert batch[1].tolist() == [0, 1]
        assert watch.of_call((batch[0],), {}) is None
    finally:
        watch.remove()


def test_an_exhausted_loader_still_ends_the_loop(batches: Batches) -> None:
    iterator = iter(DataLoader(pairs(2), batch_size=2))
    next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
