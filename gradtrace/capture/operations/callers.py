"""Who runs an operation: the user's code, a checkpoint, an optimizer, the engine, or gradtrace itself. Reads frames."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch
from torch.utils import checkpoint

from gradtrace.capture.operations.frames import is_users
from gradtrace.capture.session import Session

_AUTOGRAD = torch.autograd.__file__
_CHECKPOINT = checkpoint.__file__
_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_OPTIMIZERS = torch.optim.__path__[0]
_GUARDED = next(code for code in Session.guarded.__code__.co_consts if isinstance(code, CodeType))


class Callers:
    """The frames outside of the innermost one that runs ``code``, innermost first; a thread of the engine has none."""

    def __init__(self, code: CodeType) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        self._frames: list[FrameType] = []
        while frame is not None and frame.f_back is not None:
            frame = frame.f_back
            self._frames.append(frame)
        self.user = next((frame for frame in self._frames if is_users(frame.f_code)), None)

    @property
    def are_gradtrace(self) -> bool:
        """Whether it is gradtrace that runs the operation, as part of something else that it does."""
        for frame in self._frames:
            if frame is self.user:
                return False
            if frame.f_code is _GUARDED:
                return True
        return False

    @property
    def start_backward(self) -> bool:
        """Whether torch makes the gradient of one that ``backward()`` starts from."""
        return bool(self._frames) and self._frames[0].f_code.co_filename == _AUTOGRAD

    @property
    def recompute(self) -> bool:
        """Whether an operation inside of a backward pass belongs to a checkpoint's second forward."""
        for frame in self._frames:
            if frame.f_code is _ENGINE:
                return False
            if frame.f_code.co_filename == _CHECKPOINT:
                return True
        return False

    @property
    def include_optimizer(self) -> bool:
        """Whether an optimizer, or another part of ``torch.optim``, is at work."""
        return any(frame.f_code.co_filename.startswith(_OPTIMIZERS) for frame in self._frames)
