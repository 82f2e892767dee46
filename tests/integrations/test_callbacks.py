"""Callbacks of Lightning's Trainer and of that of transformers: each training is recorded as the trainer counts it."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import gradtrace
from gradtrace.errors import CaptureError, MissingPackageError, RunExistsError
from gradtrace.integrations import LightningCallback, TransformersCallback
from gradtrace.integrations.callback import Callback
from tests.integrations.running import SCRIPTS, run, verdict_on

# Trainers run in this process, where the libraries' own warnings are theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SNIPPETS = [block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "Callback(" in block]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
TWO_EPOCHS = 6
"""24 examples in batches of 4, two batches a step."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let torch work with one thread in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def steps(path: Path) -> list[tuple[Any, ...]]:
    """Return the numbers of a recording's steps, and of their passes."""
    with gradtrace.open_run(path) as opened:
        return opened.sql("SELECT step, micro_steps FROM steps ORDER BY step").rows


def modules(path: Path) -> list[str]:
    with gradtrace.open_run(path) as opened:
        return [module for (module,) in opened.sql("SELECT module FROM modules").rows]


def fact(path: Path, key: str) -> Any:
    with gradtrace.open_run(path) as opened:
        return getattr(opened.infos[0], key)


def network_of(package: Any) -> Any:
    """Return a model of one of the two packages; ``bad`` is the batch whose loss is NaN, ``broken`` one that raises."""

    class Network(package.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, bad: int = -1, broken: int = -1) -> None:
            super().__init__()
            self.bad, self.broken = bad, broken
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
            self.head = nn.Linear(8, 1)
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            self.seen.append(self.trainer.global_step)
            if index == self.broken:
                raise ZeroDivisionError
            loss = self(batch[0]).square().mean()
            return (loss - loss).sqrt() if index == self.bad else loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Network


Network = network_of(lightning)
BATCHES = DataLoader(TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0))), batch_size=4)


def fit(
    folder: Path,
    recording: Callback,
    model: Any = None,
    package: Any = lightning,
    resume: str | None = None,
    **more: Any,
) -> Any:
    """Fit for two epochs, two batches a step, with a validation after each, and return the trainer."""
    options = QUIET | {"max_epochs": 2, "accumulate_grad_batches": 2, "default_root_dir": folder} | more
    trainer = package.Trainer(callbacks=[recording], **options)
    trainer.fit(model or network_of(package)(), BATCHES, BATCHES, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("package", [lightning, pytorch_lightning], ids=lambda package: package.__name__)
def test_lightning_is_recorded_as_it_counts(package: Any, tmp_path: Path) -> None:
    recording = LightningCallback(tmp_path / "run.parquet")
    model = network_of(package)()
    trainer = fit(tmp_path, recording, model, package)
    assert trainer.global_step == TWO_EPOCHS
    assert model.seen == [step for step in range(TWO_EPOCHS) for _ in range(2)]
    assert steps(recording.path) == [(step, 2) for step in range(TWO_EPOCHS)]
    assert modules(recording.path) == ["", "body", "body.0", "body.1", "head"]
    assert fact(recording.path, "end") == "completed"
    assert isinstance(recording, LightningCallback)
    assert isinstance(recording, package.Callback)
    with gradtrace.open_run(recording.path) as opened:
        query = "SELECT DISTINCT step FROM records WHERE phase = 'evaluation' ORDER BY step"
        # After each epoch of three steps; what belongs to no step yet belongs to the one before. No sanity check.
        assert opened.sql(query).rows == [(2,), (5,)]


def test_each_fit_has_a_recording_of_its_own_and_a_resumed_one_goes_on_counting(tmp_path: Path) -> None:
    recording = LightningCallback(tmp_path / "run.parquet")
    first = fit(tmp_path, recording)
    assert recording.path == tmp_path / "run.parquet"
    checkpoint = str(tmp_path / "last.ckpt")
    first.save_checkpoint(checkpoint)
    fit(tmp_path, recording, resume=checkpoint, max_epochs=3)
    assert recording.path == tmp_path / "run.training-2.parquet"
    assert steps(recording.path) == [(step, 2) for step in (6, 7, 8)]
    assert len(steps(tmp_path / "run.parquet")) == TWO_EPOCHS


def test_nothing_of_it_is_in_a_checkpoint(tmp_path: Path) -> None:
    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2)
    recording = LightningCallback(tmp_path / "run.parquet")
    options: dict[str, Any] = QUIET | {"max_steps": 4, "default_root_dir": tmp_path}
    lightning.Trainer(callbacks=[saving, recording], **options).fit(Network(), BATCHES)
    checkpoint = torch.load(saving.best_model_path, weights_only=False)
    assert [key for key in checkpoint["callbacks"] if "ModelCheckpoint" not in key] == []
    assert b"gradtrace" not in Path(saving.best_model_path).read_bytes()


class Bystander(lightning.Callback):
    """Copies and pickles the other callbacks in the middle of a training, as launchers and tuners do."""

    copies: tuple[Any, ...] = ()

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        callback = next(each for each in trainer.callbacks if isinstance(each, LightningCallback))
        self.copies = (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback), copy.copy(callback))


def test_a_copy_has_the_options_and_not_the_recording_in_progress(tmp_path: Path) -> None:
    recording, bystander = LightningCallback(tmp_path / "run.parquet", exclude=["head"]), Bystander()
    options: dict[str, Any] = QUIET | {"max_steps": 3, "default_root_dir": tmp_path, "enable_checkpointing": False}
    lightning.Trainer(callbacks=[recording, bystander], **options).fit(Network(), BATCHES)
    for twin in bystander.copies:
        assert type(twin) is type(recording)
        assert {name: value for name, value in vars(recording).items() if name in vars(twin)} == vars(twin)
        assert twin.path == recording.path
    assert [step for step, _ in steps(recording.path)] == [0, 1, 2]
    twin = bystander.copies[0]
    fit(tmp_path, twin)
    assert twin.path == tmp_path / "run.training-2.parquet"
    with gradtrace.open_run(twin.path) as opened:
        assert opened.sql("SELECT count(*) FROM records WHERE module = 'head'").rows == [(0,)]


def test_an_error_ends_the_recording_and_the_model_is_watched_no_more(tmp_path: Path) -> None:
    recording = LightningCallback(tmp_path / "run.parquet")
    model = Network(broken=4)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, recording, model)
    assert recording.path.is_file()
    assert fact(recording.path, "end") == "exception ZeroDivisionError"
    assert [step for step, _ in steps(recording.path)] == [0, 1]
    assert nn.Module.__call__.__module__.startswith("torch")


def test_the_fuse_stops_lightning_before_the_weights_are_lost(tmp_path: Path) -> None:
    recording = LightningCallback(tmp_path / "run.parquet", on_nonfinite="stop")
    model = Network(bad=3)
    with pytest.raises(gradtrace.NonFiniteError) as stopped:
        fit(tmp_path, recording, model)
    assert stopped.value.step == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert fact(recording.path, "end") == "exception NonFiniteError"


def test_watch_mode_and_the_switch_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = LightningCallback(tmp_path / "run.parquet", mode="watch", watch_first=1)
    fit(tmp_path, recording)
    with gradtrace.open_run(recording.path) as opened:
        levels = [level for (level,) in opened.sql("SELECT level FROM steps ORDER BY step").rows]
    assert (levels[0], levels[-1]) == ("full", "watched")
    monkeypatch.setenv("GRADTRACE", "off")
    off = LightningCallback(tmp_path / "off.parquet")
    fit(tmp_path, off)
    assert not off.path.exists()


def test_an_older_run_is_replaced_only_when_asked(tmp_path: Path) -> None:
    fit(tmp_path, LightningCallback(tmp_path / "run.parquet"))
    with pytest.raises(RunExistsError):
        fit(tmp_path, LightningCallback(tmp_path / "run.parquet"))
    again = LightningCallback(tmp_path / "run.parquet", overwrite=True)
    fit(tmp_path, again, max_epochs=1)
    assert len(steps(again.path)) == TWO_EPOCHS // 2


@pytest.mark.parametrize("make", [LightningCallback, TransformersCallback])
def test_what_makes_no_sense_is_said_where_the_callback_is_made(make: Callable[..., Callback]) -> None:
    with pytest.raises(CaptureError, match="evry: no such setting; a callback takes baseline, capsule_limit"):
        make(evry=2)
    with pytest.raises(CaptureError, match="first_step: the trainer's own count"):
        make(first_step=2)
    with pytest.raises(CaptureError, match="no such mode: 'fast'"):
        make(mode="fast")


class Adversaries(lightning.LightningModule):
    """Two optimizers by hand: Lightning counts the steps of both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.seen.append(self.trainer.global_step)
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
            self.manual_backward(self.discriminator(self.generator(batch[0])).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.generator, self.discriminator)]


def test_two_optimizers_are_counted_as_lightning_counts_them(tmp_path: Path) -> None:
    recording, model = LightningCallback(tmp_path / "run.parquet"), Adversaries()
    options: dict[str, Any] = QUIET | {"max_epochs": 1, "default_root_dir": tmp_path, "enable_checkpointing": False}
    lightning.Trainer(callbacks=[recording], **options).fit(model, BATCHES)
    assert model.seen == [0, 2, 4, 6, 8, 10]
    assert [step for step, _ in steps(recording.path)] == model.seen
    assert modules(recording.path) == ["", "generator", "discriminator"]


def test_ranks_that_lightning_starts_itself_are_one_run(tmp_path: Path) -> None:
    """It sets no RANK, and the process of rank 0 is the parent of the other."""
    for _ in range(2):  # over the run before
        done = run(str(SCRIPTS / "lightning_ranks.py"), cwd=tmp_path)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == ["rank 0: 3", "rank 1: 3"]
    for name in ("run.parquet", "run.training-2.parquet"):
        written = sorted(path.name for path in (tmp_path / name).glob("*.parquet*"))
        assert written == ["rank-0.parquet", "rank-1.parquet"]
    with gradtrace.open_run(tmp_path / "run.parquet") as opened:
        counted = opened.sql("SELECT rank, step FROM steps ORDER BY ALL").rows
    assert counted == [(rank, step) for rank in range(2) for step in range(3)]
    verdict = verdict_on(tmp_path)
    assert (verdict["rank"], verdict["step"], verdict["module"]) == (1, 1, "normalize")
    # Lightning has put a function of its own in the forward's place, and taken it away again.
    assert verdict["confirmation"]["status"] == "not_replayed"
    assert verdict["confirmation"]["reason"] == "the module's forward was replaced after the call"


# --- transformers ----------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens; asking for the one at ``broken`` raises."""

    def __init__(self, broken: int = -1) -> None:
        self.tokens = torch.randint(50, (24, 8), generator=torch.Generator().manual_seed(1))
        self.broken = broken

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.broken:
            raise ZeroDivisionError
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def trainer_of(folder: Path, recording: Callback, data: Tokens | None = None, **more: Any) -> Trainer:
    """Return a Trainer of four steps of two batches each."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    options: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    options |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", **more}
    arguments = TrainingArguments(output_dir=str(folder / "out"), **options)
    model = GPT2LMHeadModel(config)
    return Trainer(model, arguments, train_dataset=data or Tokens(), eval_dataset=Tokens(), callbacks=[recording])


def test_the_trainer_is_recorded_as_it_counts(tmp_path: Path) -> None:
    recording = TransformersCallback(tmp_path / "run.parquet")
    trainer = trainer_of(tmp_path, recording, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert isinstance(recording, TrainerCallback)
    assert trainer.state.global_step == 4
    assert steps(recording.path) == [(step, 2) for step in range(4)]
    assert {"", "transformer.h.0.attn.c_attn", "lm_head"} <= set(modules(recording.path))
    assert fact(recording.path, "end") == "completed"
    with gradtrace.open_run(recording.path) as opened:
        query = "SELECT DISTINCT step FROM records WHERE phase = 'evaluation' ORDER BY step"
        assert opened.sql(query).rows == [(1,), (3,)]


def test_each_training_has_a_recording_of_its_own_and_a_resumed_one_goes_on_counting(tmp_path: Path) -> None:
    recording = TransformersCallback(tmp_path / "run.parquet")
    trainer_of(tmp_path, recording, save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert "gradtrace" not in (checkpoint / "trainer_state.json").read_text()
    trainer_of(tmp_path, recording).train(resume_from_checkpoint=str(checkpoint))
    assert recording.path == tmp_path / "run.training-2.parquet"
    assert steps(recording.path) == [(step, 2) for step in (2, 3)]


def test_an_error_anywhere_in_the_training_ends_the_recording(tmp_path: Path) -> None:
    """The data fail, outside of any step."""
    recording = TransformersCallback(tmp_path / "run.parquet")
    twin = pickle.loads(pickle.dumps(recording))
    trainer = trainer_of(tmp_path, recording, Tokens(broken=17))
    trainer.add_callback(twin)
    twin._path = tmp_path / "twin.parquet"
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    for each in (recording, twin):
        assert each.path.is_file()
        assert fact(each.path, "end") == "exception ZeroDivisionError"
    assert nn.Module.__call__.__module__.startswith("torch")


def test_the_fuse_stops_the_trainer_before_the_weights_are_lost(tmp_path: Path) -> None:
    recording = TransformersCallback(tmp_path / "run.parquet", on_nonfinite="stop")
    trainer = trainer_of(tmp_path, recording, max_grad_norm=0.0)
    loss_of = trainer.compute_loss

    def compute_loss(model: nn.Module, inputs: Any, **more: Any) -> Any:
        loss = loss_of(model, inputs, **more)
        return (loss - loss).sqrt() if trainer.state.global_step == 2 else loss

    trainer.compute_loss = compute_loss
    with pytest.raises(gradtrace.NonFiniteError) as stopped:
        trainer.train()
    assert stopped.value.step == 2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert fact(recording.path, "end") == "exception NonFiniteError"


# --- what both have in common ----------------------------------------------------------------------------

LOADED = """
import sys
from gradtrace.integrations import LightningCallback, TransformersCallback
print(sorted({"torch", "lightning", "pytorch_lightning", "transformers"} & set(sys.modules)))
"""


def test_importing_the_callbacks_loads_no_trainer_and_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


ONLY_ONE = """
import sys
from gradtrace.integrations import LightningCallback
import pytorch_lightning
print(isinstance(LightningCallback(), pytorch_lightning.Callback), "lightning.pytorch" in sys.modules)
"""


def test_of_two_packages_the_one_in_use_counts_though_it_is_imported_later(tmp_path: Path) -> None:
    assert run("-c", ONLY_ONE, cwd=tmp_path).stdout == "True False\n"


def test_a_trainer_that_is_not_installed_is_named() -> None:
    class Unheard(Callback):
        bases = (("unheard_of.callbacks", "Callback"),)

    with pytest.raises(MissingPackageError, match="needs unheard_of; to install it: pip install unheard_of"):
        Unheard()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["transformers", "lightning"])
def test_the_page_shows_how_to_use_them(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    is_lightning = "Lightning" in snippet
    model = Network() if is_lightning else trainer_of(tmp_path, TransformersCallback("unused.parquet")).model
    exec(snippet, {"model": model, "batches": BATCHES, "texts": Tokens()})
    assert capsys.readouterr().out.splitlines()[-1] == "recorded in run.parquet"
    assert len(steps(Path("run.parquet"))) == (12 if is_lightning else 20)


@pytest.mark.parametrize(
    ("script", "around", "module", "op"),
    [
        ("lightning_spread.py", range(30, 80), "likelihood", "LogBackward0"),  # when depends on the processor
        ("transformers_answers.py", range(12, 13), "", "DivBackward0"),
    ],
)
def test_the_verdict_on_an_example(script: str, around: range, module: str, op: str, tmp_path: Path) -> None:
    run(str(ROOT / "examples" / script), cwd=tmp_path)
    verdict = verdict_on(tmp_path)
    assert (verdict["phase"], verdict["module"], verdict["op"]) == ("forward", module, op)
    assert verdict["step"] in around
