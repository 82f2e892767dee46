"""The fused way to measure tensors of a CUDA device: one pass, one launch a tensor, one copy to the host a step.

Experimental: the kernel is proven equal to the CPU's way under Triton's interpreter, but its speed has not been
measured. PyTorch's own operations take some fifteen launches and several passes for the same numbers.

The numbers of a tensor are a row of six doubles in a ``_Page`` on its device. ``FusedBuffer.row_for`` launches the
kernel and returns at once; ``fetch`` brings rows to the host, together with numbers that were taken in the other
way. A ``Row`` keeps its page, so a row taken while another thread fetches is not lost: it is fetched next time.

Nothing here may harm a training: where Triton is missing, or does not compile, launch or compute as it should, one
note says so, and from then on ``row_for`` returns None, as it does for every tensor that the kernel does not take.
How the programs of a launch combine what they found, and why norms do not depend on their order: ``fused_kernel``.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.errors import GradtraceWarning

BLOCK = 2048
"""Number of elements that a program reads at a time: eight for each of its 256 threads."""
_MOST_PROGRAMS = 1024
"""Fills every accelerator of today; a fixed number, so that a tensor has the same norm on all of them."""
_FIRST_PAGE = 256
"""Number of rows of the first page of a device; what a step has needed is what the next one begins with."""
_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_PROBE = (math.nan, math.inf, -math.inf, -3.0, 4.0)
_TRUE = ("1", "true", "yes", "on", "y")


class Row(NamedTuple):
    """Where the numbers of a tensor will be."""

    page: _Page
    place: int

    @property
    def device(self) -> torch.device:
        """The device that the tensor is on."""
        return self.page.rows.device


class FusedBuffer:
    """Launches the kernel, and keeps the pages that it writes to, one a device and step unless more are needed."""

    def __init__(self, *, note: Callable[[str], None] | None = None, load: Callable[[], Any] | None = None) -> None:
        """``note`` takes the one sentence of a fallback, ``load`` returns the kernel; by default one is a warning."""
        self._note = note or _warn
        self._load = load or _load
        self._interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE
        self._lock = threading.RLock()
        self._works = True
        self._kernel: Any = None
        self._pages: dict[torch.device, _Page] = {}
        self._wanted: dict[torch.device, int] = {}
        """Number of rows of a device's next page; a device that is not in here has proved nothing yet."""

    def row_for(self, values: Tensor) -> Row | None:
        """Launch the kernel over ``values`` and return where its numbers will be; None if it has to go another way.

        Takes dense float16, bfloat16 and float32 tensors of a CUDA device; under Triton's interpreter those of
        the CPU instead. Never raises, and waits only once a device: for the proof that the kernel computes as it
        should, which the first tensor brings about.
        """
        if not (self._works and self._takes(values)):
            return None
        try:
            with self._lock, torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
                if values.is_cuda and torch.cuda.is_current_stream_capturing():
                    return None  # every replay of the graph would write again
                page = self._page_on(values.device)
                return Row(page, self._launch(values, page))
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])
            return None

    def turn(self) -> None:
        """Begin new pages with the next row. To be called before the rows so far are fetched."""
        with self._lock:
            self._pages.clear()

    def _takes(self, values: Tensor) -> bool:
        if values.dtype not in _TYPES or values.is_cuda == self._interpreted:
            return False
        if not (values.is_cuda or values.device.type == "cpu") or values.numel() == 0:
            return False
        return is_dense(values) and not values.is_neg()  # of a negated view, memory holds the opposite

    def _page_on(self, device: torch.device) -> _Page:
        """Return a page with a free row."""
        page = self._pages.get(device)
        if page is None and device not in self._wanted:
            self._kernel = self._kernel or self._load()
            self._prove(device)
        if page is None:
            page = self._pages[device] = _Page(device, self._wanted.setdefault(device, _FIRST_PAGE))
        elif page.used == len(page.rows):
            self._wanted[device] = 2 * len(page.rows)
            page = self._pages[device] = _Page(device, self._wanted[device])
        return page

    def _launch(self, values: Tensor, page: _Page) -> int:
        page.join()
        index, numel = page.used, values.numel()
        page.used += 1
        grid = (min(-(-numel // BLOCK), _MOST_PROGRAMS),)
        # Said though it is the default: some releases of Triton warn where it is not.
        self._kernel[grid](values, numel, page.rows, index, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=True)
        return index

    def _prove(self, device: torch.device) -> None:
        """Measure what is known, once a device, and wait for it: hardware and releases differ."""
        page = _Page(device, 1)
        self._launch(torch.tensor(_PROBE, device=device).repeat(1000), page)
        if fetch([Row(page, 0)]) != [[1000.0, 1000.0, 1000.0, -3.0, 4.0, _rounded(math.sqrt(25_000.0))]]:
            raise ArithmeticError("it gave wrong numbers for known values")

    def _give_up(self, reason: str) -> None:
        with self._lock:
            is_first, self._works = self._works, False
        if is_first:
            self._note(
                f"the fused kernel cannot be used ({reason}); tensors of the accelerator are measured with PyTorch's "
                "own operations: the same numbers, slower"
            )


class _Page:
    """Rows on a device, and which streams write to them."""

    __slots__ = ("_ready", "_streams", "rows", "used")

    def __init__(self, device: torch.device, length: int) -> None:
        self.rows = torch.zeros((length, 6), dtype=torch.float64, device=device)
        self.rows[:, 3] = math.inf
        self.rows[:, 4] = -math.inf
        self.used = 0
        self._streams: dict[torch.cuda.Stream, None] = {}
        self._ready = torch.cuda.current_stream(device).record_event() if self.rows.is_cuda else None

    def join(self) -> None:
        """Let the current stream write here: after the page was made, and before its memory is used for else."""
        if self._ready is None:
            return
        stream = torch.cuda.current_stream(self.rows.device)
        if stream not in self._streams:
            stream.wait_event(self._ready)
            self.rows.record_stream(stream)
            self._streams[stream] = None

    def written(self) -> Tensor:
        """Return the rows in use, which the current stream reads after what all streams have written so far."""
        if self._ready is not None:
            reader = torch.cuda.current_stream(self.rows.device)
            for writer in tuple(self._streams):
                reader.wait_stream(writer)
        return self.rows[: self.used]


def fetch(numbers: Sequence[Row | Tensor]) -> list[list[float]]:
    """Bring the numbers of tensors of one device to the host: one copy, and one wait for it.

    Those of a ``Row`` are nan, posinf, neginf, min, max and norm: a tensor without a finite element has min = +Inf
    and max = -Inf. Those of a ``Tensor``, of one dimension, are its elements.
    """
    starts: dict[int, int] = {}
    parts: list[Tensor] = []
    length = 0
    for number in numbers:
        source = number.page if isinstance(number, Row) else number
        if id(source) not in starts:
            starts[id(source)] = length
            parts.append(source.written().reshape(-1) if isinstance(source, _Page) else source)
            length += len(parts[-1])
    values = _on_host(parts[0] if len(parts) == 1 else torch.cat(parts))
    found = []
    for number in numbers:
        if isinstance(number, Row):
            start = starts[id(number.page)] + 6 * number.place
            found.append(_with_norm(values[start : start + 6]))
        else:
            start = starts[id(number)]
            found.append(values[start : start + len(number)])
    return found


def is_dense(values: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each once, in whatever order."""
    if values.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _on_host(values: Tensor) -> list[float]:
    if values.is_cuda:
        there, values = values, torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        values.copy_(there, non_blocking=True)
        torch.cuda.current_stream(there.device).synchronize()
    numbers: list[float] = values.tolist()
    return numbers


def _with_norm(row: list[float]) -> list[float]:
    return [*row[:5], _rounded(math.sqrt(row[5]))]


def _rounded(norm: float) -> float:
    """Return ``norm`` to float32's 24 significant bits, whatever its magnitude."""
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(mantissa * 2**24), exponent - 24)


def _load() -> Any:
    from gradtrace.capture.fused_kernel import measure

    return measure


def _warn(message: str) -> None:
    # The user's filters may turn warnings into errors.
    with contextlib.suppress(Exception):
        warnings.warn(message, GradtraceWarning, stacklevel=2)
