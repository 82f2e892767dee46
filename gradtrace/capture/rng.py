"""The state of all random number generators that a training uses: taken, and put back bit by bit."""

from __future__ import annotations

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
    def now(cls) -> Rng:
        """Take the present state; initialises no device and imports nothing."""
        numpy = sys.modules.get("numpy")
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if in_use else (),
            numpy.random.get_state() if numpy is not None else None,
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
