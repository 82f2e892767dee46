"""``gradtrace record`` on trainings with the real torch: the script's streams, the file, the last words."""

import json
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow.parquet as pq

import gradtrace
from gradtrace.trace.runinfo import METADATA_KEY, RunInfo

CONSOLE_SCRIPT = str(Path(sysconfig.get_path("scripts"), "gradtrace"))

HEALTHY = """
import os
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(12, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
for (x,) in loader:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print(torch.get_num_threads(), sum(p.sum().item() for p in model.parameters()).hex())
"""

FAILING = """
import threading
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        try:
            return self.linear(x)
        except RuntimeError as error:
            raise ValueError("a wrong shape") from error

model = nn.Sequential(Block())
thread = threading.Thread(target=model, args=(torch.ones(2, 5),), name="trainer")
thread.start()
thread.join()
model(torch.ones(2, 4)).sum().backward()
model(torch.ones(2, 3))
"""

NONFINITE = """
import sys
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.ones(2, 4)
    loss = (model(x) - model(x) if step == 2 else model(x)).square().sum().sqrt()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
sys.exit(5)
"""

ENDLESS = """
import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
step = 0
while True:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step == 5:
        print("ready", flush=True)
"""

IN_A_THREAD = """
import threading
import torch
from torch import nn

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        assert type(nn.Identity()(index)) is int
        return torch.full((4,), float(index * index))

def train(batches):
    threading.main_thread().join()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for x in batches:
        model(x).sum().backward()
        optimizer.step()
        print(x[0, 0].item())

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Squares(), 2, num_workers=1, multiprocessing_context="spawn")
    threading.Thread(target=train, args=(list(loader),)).start()
"""


def run(command, directory):
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


def record(directory, *options, script="train.py"):
    return run([CONSOLE_SCRIPT, "record", *options, script], directory)


def own_lines(stderr):
    return [line for line in stderr.splitlines() if line.startswith("gradtrace: ")]


def without_own_lines(stderr):
    return "".join(line for line in stderr.splitlines(True) if not line.startswith("gradtrace: "))


def info_of(path):
    return RunInfo.from_json(pq.read_schema(path).metadata[METADATA_KEY], str(path))


def test_a_healthy_training_is_recorded_and_left_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text(HEALTHY)
    native = run([sys.executable, "train.py"], tmp_path)

    done = record(tmp_path)

    assert (done.returncode, done.stdout) == (0, native.stdout)
    assert len(done.stdout.splitlines()) == 4
    wrote, following = done.stderr.splitlines()
    match = re.fullmatch(r"gradtrace: wrote run\.parquet: 3 steps, 4 of 4 modules, (\d+) records, [\d.]+ kB", wrote)
    assert match is not None, wrote
    assert following == "gradtrace: no incident; see: gradtrace summary run.parquet"
    assert int(match[1]) == pq.read_metadata(tmp_path / "run.parquet").num_rows > 0
    assert info_of(tmp_path / "run.parquet").end == "completed"
    assert info_of(tmp_path / "run.parquet").command == ["train.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.parquet", "train.py"]


def test_an_error_inside_a_module_is_shown_as_under_python(tmp_path):
    (tmp_path / "train.py").write_text(FAILING)
    native = run([sys.executable, "train.py"], tmp_path)

    done = record(tmp_path)

    assert native.stderr.count("Traceback (most recent call last)") == 4
    assert (done.returncode, done.stdout) == (1, native.stdout)
    assert without_own_lines(done.stderr) == native.stderr
    assert info_of(tmp_path / "run.parquet").end == "exception ValueError"
    assert len(own_lines(done.stderr)) == 2


def test_an_incident_is_told_and_the_older_run_kept(tmp_path):
    (tmp_path / "train.py").write_text(NONFINITE)
    (tmp_path / "run.parquet").write_text("an older run")

    done = record(tmp_path)

    assert done.returncode == 5
    lines = done.stderr.splitlines()
    assert lines[0] == "gradtrace: moved the older run.parquet to run.1.parquet"
    told = "gradtrace: warning: step 2: gradients not finite; first non-finite: (root), grad_output 0"
    assert lines[1] == told
    assert lines[2].startswith("gradtrace: note: the failing step is saved beside the run in run.capsule.pt (")
    assert lines[3].startswith("gradtrace: wrote run.parquet: 4 steps, 1 of 1 module, ")
    assert lines[4:] == ["gradtrace: 1 incident; see: gradtrace first-nan run.parquet"]
    assert (tmp_path / "run.1.parquet").read_text() == "an older run"
    assert info_of(tmp_path / "run.parquet").end == "exit 5"


def test_sigterm_in_the_middle_of_a_training_keeps_what_was_recorded(tmp_path):
    (tmp_path / "train.py").write_text(ENDLESS)
    command = [CONSOLE_SCRIPT, "record", "-o", "x.parquet", "train.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, stderr = process.communicate(timeout=60)

    assert process.returncode == -signal.SIGTERM
    kept = "gradtrace: signal SIGTERM; what was recorded is kept: gradtrace first-nan x.parquet\n"
    assert stderr == kept
    information = json.loads((tmp_path / "x.parquet.parts" / "run.json").read_text())
    assert information["end"] == "signal SIGTERM"
    assert information["steps"] >= 4
    assert information["records"] > 0
    assert not (tmp_path / "x.parquet").exists()
    with gradtrace.open_run(tmp_path / "x.parquet") as kept_run:
        assert kept_run.sql("select count(*) from records").rows == [(information["records"],)]


def test_a_training_in_a_thread_that_outlives_the_script_is_recorded_to_its_end(tmp_path):
    (tmp_path / "train.py").write_text(IN_A_THREAD)

    done = record(tmp_path, "--exclude", "layers.*")

    assert (done.returncode, done.stdout) == (0, "0.0\n4.0\n16.0\n")
    assert own_lines(done.stderr)[0] == "gradtrace: warning: --exclude 'layers.*' matches no module"
    assert "pattern" not in done.stderr
    assert info_of(tmp_path / "run.parquet").steps == 3
