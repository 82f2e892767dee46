"""What all tests share: signals do what they do by default, whoever has started the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _signals_are_listened_to() -> Iterator[None]:
    """nohup has SIGHUP ignored, a shell SIGINT in what it runs in the background; both are passed on to processes."""
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
