"""What is compared with a plain training: each variant is one way to look at it, made for a model once.

A variant switches itself on for a block of steps (``pairs.Side``). ``off`` is the control: nothing at all.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.floor import Floor
from benchmarks.models import Training
from benchmarks.naive import Naive
from benchmarks.pairs import Side
from gradtrace.capture.tracer import Tracer
from gradtrace.trace.writer import RunWriter

ROWS_PER_PART = 16_384
"""Rows that are turned into Parquet at a time. The default is more than a block of steps has, which would leave the
encoding, whose time goes by the rows, out of what is measured."""


def off(training: Training, folder: Path) -> Side:
    """Nothing."""
    return Side(nullcontext)


def floor(training: Training, folder: Path) -> Side:
    """One ``x.sum()`` of each distinct boundary tensor."""
    return Side(Floor(training).reading)


def detect_anomaly(training: Training, folder: Path) -> Side:
    """torch's anomaly detection, as ``torch.autograd.detect_anomaly()`` is by default."""

    def watch() -> AbstractContextManager[object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow
            return torch.autograd.detect_anomaly()

    return Side(watch)


def underflow_overflow(training: Training, folder: Path) -> Side:
    """transformers' DebugUnderflowOverflow."""
    from transformers.debug_utils import DebugUnderflowOverflow

    @contextmanager
    def watch() -> Iterator[None]:
        before = {module: [*module._forward_hooks] for module in training.model.modules()}
        DebugUnderflowOverflow(training.model)
        try:
            yield
        finally:  # it cannot be switched off
            for module, kept in before.items():
                for key in [key for key in module._forward_hooks if key not in kept]:
                    del module._forward_hooks[key]

    return Side(watch)


def naive(training: Training, folder: Path) -> Side:
    """Hooks on every module, six statistics of every tensor, rows as Python objects."""
    return Side(lambda: Naive(training, folder / "naive.parquet"))


def gradtrace(**options: Any) -> Callable[[Training, Path], Side]:
    """Return a variant that records with these options of ``Tracer``."""

    def make(training: Training, folder: Path) -> Side:
        @contextmanager
        def watch() -> Iterator[None]:
            with recording(training, folder / "run.parquet", **options):
                yield

        every = options.get("every", 1)
        # The first step also records the state that the run starts with; in watch mode the first five are captured.
        return Side(watch, warm_up=7 if options.get("mode") == "watch" else 2, period=every)

    return make


@contextmanager
def recording(training: Training, path: Path, **options: Any) -> Iterator[Tracer]:
    """Record the training, its rows turned into Parquet in parts that are small enough to be part of a block."""
    defaults = RunWriter.__init__.__kwdefaults__
    with (
        mock.patch.dict(defaults, rows_per_part=ROWS_PER_PART),
        Tracer(training.model, path, existing="overwrite", **options) as tracer,
    ):
        yield tracer


VARIANTS: dict[str, Callable[[Training, Path], Side]] = {
    "floor": floor,
    "detect_anomaly": detect_anomaly,
    "underflow_overflow": underflow_overflow,
    "naive": naive,
    "full": gradtrace(),
    "every10": gradtrace(every=10),
    "watch": gradtrace(mode="watch"),
    "no_replay": gradtrace(replays=0, capsule_limit=0),
}
"""Those that a table may have, besides ``off``; ``no_replay`` is full capture that keeps nothing for a replay."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Give a folder for what is written."""
    with tempfile.TemporaryDirectory(prefix="gradtrace-benchmark-") as folder:
        yield Path(folder)
