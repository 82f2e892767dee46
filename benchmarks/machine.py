"""What every number depends on: the machine and the versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """Return processor, cores, threads of torch and versions in one line."""
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{processor()}, {threads}, torch {torch.__version__}, Python {platform.python_version()}"


def processor() -> str:
    """Return the processor's name as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
