"""What the views hold: every column with its type, unit and meaning, for ``gradtrace sql --schema``."""

from __future__ import annotations

from gradtrace.analysis.recording import Recording, answers
from gradtrace.trace.schema import COLUMNS as RECORD_COLUMNS

COLUMNS = ("view", "column", "type", "unit", "meaning")
"""The columns of what ``describe`` returns."""

VIEWS = ("records", "params", "grads", "steps", "modules", "events", "meta")

_RECORDS = {column.name: (column.unit, column.meaning) for column in RECORD_COLUMNS}
_OTHERS: dict[tuple[str, str], tuple[str, str]] = {
    ("steps", "level"): ("", "full: every boundary was captured; watched: losses, norms, outputs of outermost modules"),
    ("steps", "micro_steps"): ("passes", "forward/backward passes of the step"),
    ("steps", "records"): ("records", "records of boundaries in the step"),
    ("steps", "nan_records"): ("records", "those that hold a NaN"),
    ("steps", "posinf_records"): ("records", "those that hold a +Inf"),
    ("steps", "neginf_records"): ("records", "those that hold a -Inf"),
    ("steps", "loss"): ("", "the last loss handed to backward in the step"),
    ("steps", "grad_norm"): (
        "",
        "L2 norm of all gradients as they last arrived; of a watched step, as they then stood",
    ),
    ("steps", "lr"): ("", "learning rate of the first parameter group"),
    ("steps", "loss_scale"): ("", "GradScaler's scale"),
    ("steps", "skipped"): ("", "whether GradScaler skipped the optimizer step"),
    ("modules", "module"): ("", "name, as in records"),
    ("modules", "number"): ("", "place in the model's order, from 0"),
    ("modules", "type"): ("", "class"),
    ("modules", "root"): ("", "whether it is an outermost module"),
    ("modules", "depth"): ("levels", "levels below the outermost module"),
    ("modules", "file"): ("", "source file of the class"),
    ("modules", "line"): ("", "line of the class in that file"),
    ("modules", "parameters"): ("elements", "elements of the module's own parameters"),
    ("modules", "shapes"): ("", "shapes of the module's own parameters, by name"),
    ("modules", "calls"): ("calls", "calls that were seen"),
    ("events", "event"): ("", "skip, incident, replay, switch, stop or lost"),
    ("meta", "key"): ("", "what is known of the run: run_id, command, versions, end"),
    ("meta", "value"): ("", "text, or JSON for what is no text"),
}


@answers
def describe(run: Recording) -> list[tuple[str, str, str, str, str]]:
    """Return view, column, type, unit and meaning of every column of every view, in order."""
    rows = []
    for view in VIEWS:
        for name, kind, *_ in run.execute(f"DESCRIBE {view}").fetchall():
            unit, meaning = _OTHERS.get((view, name)) or _RECORDS[name]
            rows.append((view, name, kind, unit, meaning))
    return rows
