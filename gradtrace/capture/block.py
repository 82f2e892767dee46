"""``gradtrace.trace``: a recording as a block of the user's own program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from gradtrace.capture.replay.alarm import OnNonFinite
from gradtrace.capture.tracer import Engine, Models, Tracer


def trace(
    models: Models,
    path: str | os.PathLike[str] = "run.parquet",
    *,
    engine: Engine = "graph",
    every: int = 1,
    steps: tuple[int | None, int | None] | None = None,
    first_step: int = 0,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    replays: int = 3,
    on_nonfinite: OnNonFinite = "continue",
    loss_lines: bool = True,
    op_steps: tuple[int | None, int | None] | None = None,
    capsule_limit: int = 2**30,
    overwrite: bool = False,
) -> Tracer:
    """Return a tracer to be used in a ``with`` statement; see ``Tracer`` for the arguments.

    Example::

        with gradtrace.trace(model, "run.parquet") as tracer:
            train(model)
        gradtrace.open_run(tracer.path).sql("select * from records where nan_count > 0")

    Raises:
        CaptureError, RunExistsError: see ``Tracer``; both when the block is entered.
    """
    return Tracer(
        models,
        path,
        engine=engine,
        every=every,
        steps=steps,
        first_step=first_step,
        include=include,
        exclude=exclude,
        replays=replays,
        on_nonfinite=on_nonfinite,
        loss_lines=loss_lines,
        op_steps=op_steps,
        capsule_limit=capsule_limit,
        existing="overwrite" if overwrite else "refuse",
        command=list(sys.argv),
    )
