"""Trainings under a tracer and a profiler of the script's own, in coroutines and generators, and with faulthandler."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

torch.manual_seed(0)


class Traced:
    """Counts what a tracer and a profiler are told of this file."""

    def __init__(self) -> None:
        self.lines = 0
        self.calls = 0

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != __file__:
            return None
        self.lines += event == "line"
        return self.trace

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        self.calls += event == "call" and frame.f_code.co_filename == __file__


class Layers(nn.Module):
    """Yields the output of each layer; takes a generator of batches, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            for layer in self.layers:
                batch = torch.tanh(layer(batch))
                yield batch


class Awaited(nn.Module):
    """A model whose forward is a coroutine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    async def forward(self, batch: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.linear(batch)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item())


def under_a_tracer_and_a_profiler() -> None:
    traced, model = Traced(), mlp()
    threading.settrace(traced.trace)
    sys.settrace(traced.trace)
    train(model, 3)
    sys.settrace(None)
    sys.setprofile(traced.profile)
    train(model, 3)
    print(sys.getprofile() == traced.profile)
    sys.setprofile(None)
    print(traced.lines, traced.calls)


async def batches() -> AsyncIterator[Tensor]:
    for _ in range(4):
        await asyncio.sleep(0)
        yield torch.randn(5, 4)


async def in_coroutines() -> None:
    async def one(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async for batch in batches():
            optimizer.zero_grad()
            output = model(batch)
            await asyncio.sleep(0)
            loss = (await output if isinstance(model, Awaited) else output).square().mean()
            loss.backward()
            await asyncio.sleep(0)
            optimizer.step()
            print(loss.item())

    asyncio.get_running_loop().slow_callback_duration = 60.0  # not said, however busy the machine is
    await asyncio.gather(one(mlp()), one(Awaited()))


def in_generators() -> None:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum(output.square().mean() for output in model(torch.randn(3, 4) for _ in range(2)))
        loss.backward()
        optimizer.step()
        print(loss.item())
    begun = model(iter([torch.randn(3, 4)]))
    next(begun)
    del begun


def with_faulthandler() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file, chain=False)
        model = mlp()
        model[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
        train(model, 2)
        file.seek(0)
        print(file.read().count("in with_faulthandler"))
        faulthandler.unregister(signal.SIGUSR1)


under_a_tracer_and_a_profiler()
asyncio.run(in_coroutines(), debug=True)
in_generators()
with_faulthandler()
print(sys.flags.dev_mode, sys.warnoptions, sys.flags.safe_path if sys.version_info >= (3, 11) else None)
