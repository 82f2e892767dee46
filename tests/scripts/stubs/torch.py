"""Stands in for torch where only the life of a recording is tested: importing it brings a stub tracer.

The stub prints each call to stdout. STUB_FAILS names the call that fails and how: ``start:RuntimeError``.
"""

import builtins
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gradtrace.errors

WHERE, _, ERROR = os.environ.get("STUB_FAILS", "").partition(":")


class Tracer:
    def __init__(self, **options):
        self.options = options
        self.path = Path(options["path"])
        self.moved_to = self.path.with_name("older.parquet") if options["existing"] == "move_aside" else None
        self.bytes_written = 1234
        self.in_one_file = self.is_in_place = True
        self.info = SimpleNamespace(
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            end="completed",
            steps=2,
            captured=2,
            records=34,
            incidents=0,
            last_step=1,
            notes=[],
            unmeasured={},
            modules=[SimpleNamespace(name="", file="net.py", calls=2)],
        )

    def start(self):
        call("start", self.options)
        warnings.warn("a warning of gradtrace", gradtrace.errors.GradtraceWarning, stacklevel=2)
        warnings.warn("a warning of torch", UserWarning, stacklevel=2)

    def stop(self, end="completed"):
        call("stop", end)

    def stop_quickly(self, end):
        call("stop_quickly", end)


def call(name, value):
    print(name, value, flush=True)
    if name == WHERE:
        raise (getattr(builtins, ERROR, None) or getattr(gradtrace.errors, ERROR))("it went wrong")


module = ModuleType("gradtrace.capture.tracer")
module.Tracer = Tracer
sys.modules[module.__name__] = module
