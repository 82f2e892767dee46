"""``gradtrace record --op-steps`` and ``--on-nonfinite stop`` on real trainings."""

import json

import gradtrace
from tests.integrations.test_record_training import CONSOLE_SCRIPT, own_lines, record, run

TRAIN = """
import torch
from torch import nn

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.weight * x).sqrt()  # forward

model = Root()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for step in range(3):
        y = model(torch.full((3,), 0.0 if step == 2 else 4.0))
        loss = y.square().sum()  # loss
        loss = loss + y.sum()
        optimizer.zero_grad()
        loss.backward()  # backward
        optimizer.step()
finally:
    print(step, model.weight.tolist())
"""
FORWARD, LOSS, BACKWARD = (
    next(number for number, line in enumerate(TRAIN.splitlines(), 1) if line.endswith(f"# {mark}"))
    for mark in ("forward", "loss", "backward")
)


def first_nan_of(tmp_path, path):
    done = run([CONSOLE_SCRIPT, "first-nan", str(path), "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rows_of(path, query):
    with gradtrace.open_run(path) as run_:
        return run_.execute(query).fetchall()


def test_every_operation_of_the_chosen_steps_is_recorded_with_module_and_line(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)

    done = record(tmp_path, "--op-steps", "1:2", "-o", "ops.parquet")
    plain = record(tmp_path, "-o", "plain.parquet")

    assert (done.returncode, plain.returncode) == (0, 0)
    path = tmp_path / "ops.parquet"
    with_op = "FROM records WHERE op IS NOT NULL AND phase <> 'replay'"
    assert rows_of(path, f"SELECT DISTINCT step {with_op}") == [(1,)]
    found = rows_of(path, f"SELECT phase, op, module, line {with_op}")
    assert ("forward", "SqrtBackward0", "", FORWARD) in found
    assert ("backward", "SqrtBackward0", "", FORWARD) in found
    loss = {(module, line) for phase, _, module, line in found if phase == "loss"}
    assert (None, LOSS) in loss
    assert ("backward", "PowBackward0", None, LOSS) in found
    verdicts = [first_nan_of(tmp_path, tmp_path / name) for name in ("ops.parquet", "plain.parquet")]
    for verdict in verdicts:
        verdict.pop("run", None)
    assert without_seq(verdicts[0]) == without_seq(verdicts[1])


def without_seq(value):
    """Leave out what numbers rows: there are more of them with operations."""
    if isinstance(value, dict):
        return {key: without_seq(item) for key, item in value.items() if key not in ("seq", "records", "run_id")}
    return [without_seq(item) for item in value] if isinstance(value, list) else value


def test_the_fuse_ends_the_script_with_its_own_traceback_and_the_weights_of_before(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    healthy = record(tmp_path, "-o", "all.parquet")

    done = record(tmp_path, "--on-nonfinite", "stop")

    assert done.returncode == 1
    step, _, weights = done.stdout.strip().partition(" ")
    assert step == "2"
    assert all(abs(weight) < 10 for weight in json.loads(weights))
    assert "nan" in healthy.stdout or "inf" in healthy.stdout
    traceback = [line for line in done.stderr.splitlines() if line not in own_lines(done.stderr)]
    assert traceback[0] == "Traceback (most recent call last):"
    frames = [line for line in traceback if line.startswith('  File "')]
    assert frames[0].endswith(f'train.py", line {BACKWARD}, in <module>')
    assert not any("gradtrace/" in line for line in frames)
    assert traceback[-1].startswith("gradtrace.errors.NonFiniteError: step 2: gradients not finite; ")
    assert traceback[-1].endswith(f"for the verdict: gradtrace first-nan {tmp_path / 'run.parquet'}")
