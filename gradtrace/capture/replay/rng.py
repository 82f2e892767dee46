"""The state of all random number generators that a training uses: taken, and put back bit by bit."""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rng:
    """State of torch's CPU generator, of the accelerators in use, of numpy's global generator and of ``random``."""

    cpu: Tensor
    devices: tuple[Tensor, ...]
    numpy: Any
    python: Any

    @classmethod
    def now(cls, *, quickly: bool = False) -> Rng:
        """Take the present state; initialises no device and imports nothing.

        With ``quickly`` numpy's may lack half of a pair of normal numbers that is left over in its generator.
        """
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if in_use else (),
            _numpy_state(quickly),
            random.getstate(),
        )

    def restore(self) -> None:
        """Put the state back."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        random.setstate(self.python)


_MERSENNE_BYTES = 4 * 625
"""The memory of numpy's default legacy generator: 624 words and a position."""

_last_numpy: tuple[bytes, Any] = (b"", None)
"""The generator's memory when its state was last asked for, and the state: asking takes 70 us, looking 1 us."""


def _numpy_state(quickly: bool) -> Any:
    """Return the state of numpy's global generator, None where numpy has not been imported."""
    global _last_numpy
    numpy, module = sys.modules.get("numpy"), sys.modules.get("numpy.random.mtrand")
    if numpy is None or not hasattr(module, "_rand"):  # not imported, or half: an import may have been interrupted
        return None
    generator = numpy.random.mtrand._rand._bit_generator
    if not quickly or type(generator).__name__ != "MT19937":
        return numpy.random.get_state()
    memory = ctypes.string_at(generator.ctypes.state_address, _MERSENNE_BYTES)
    if memory != _last_numpy[0]:
        _last_numpy = memory, numpy.random.get_state()
    return _last_numpy[1]
