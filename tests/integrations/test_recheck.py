"""``gradtrace.recheck``: mended scripts against capsules of their failing steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradtrace
from gradtrace.capture.names import Root
from gradtrace.capture.recheck.capsule import save
from tests.failing_step import failing_step, keep
from tests.rechecking import (
    BAD,
    FINE,
    GIB,
    HEAD,
    LOOP,
    NOT_CHECKED,
    SCRIPTS,
    TRAINING,
    a_capsule,
    a_script,
    by_hand,
    capsule_of_script,
    error,
    statuses,
    with_optimizer,
)


@pytest.fixture(scope="module")
def capsules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The failing steps of the example scripts."""
    folder = tmp_path_factory.mktemp("capsules")
    phases = {"labels": "loss", "distance": "backward", "standardise": "forward"}
    return {name: capsule_of_script(folder, SCRIPTS / f"{name}.py", phase) for name, phase in phases.items()}


# The three examples ------------------------------------------------------------------------------------------


def test_a_loss_that_fails_on_its_labels(capsules: dict[str, Path]) -> None:
    before = gradtrace.recheck(capsules["labels"], SCRIPTS / "labels.py")
    assert statuses(before) == [FINE, FINE, BAD, FINE]
    assert before.loss.boundary == "nan"
    assert not before.ok
    after = gradtrace.recheck(capsules["labels"], SCRIPTS / "labels.py", ["--mended"])
    assert statuses(after) == [FINE] * 4
    assert after.ok and after.complete and after.notes == ()


def test_a_module_whose_backward_fails(capsules: dict[str, Path]) -> None:
    before = gradtrace.recheck(capsules["distance"], SCRIPTS / "distance.py")
    assert statuses(before) == [FINE, FINE, FINE, BAD]
    # One row of three has distance 0: its four elements of the slope are 0 * inf.
    assert before.gradients.boundary == "distance (Distance), grad_input 0: 4 nan of 12"
    assert before.gradients.op == "PowBackward0"
    line = (
        (SCRIPTS / "distance.py")
        .read_text()
        .splitlines()
        .index("        return ((left - right).square().sum(-1) + EPSILON).sqrt()")
    )
    assert before.gradients.location == f"distance.py:{line + 1} in forward"
    assert before.gradients.message == "Function 'PowBackward0' returned nan values in its 0th output"
    after = gradtrace.recheck(capsules["distance"], SCRIPTS / "distance.py", ["--mended"])
    assert statuses(after) == [FINE] * 4
    assert after.ok


def test_a_script_without_a_dataloader(capsules: dict[str, Path]) -> None:
    before = gradtrace.recheck(capsules["standardise"], SCRIPTS / "standardise.py")
    assert statuses(before) == [FINE, BAD, NOT_CHECKED, BAD]
    assert before.forward.boundary == "0 (Standardise), output 0: 4 nan of 12"
    assert not before.ok
    after = gradtrace.recheck(capsules["standardise"], SCRIPTS / "standardise.py", ["--mended"])
    assert statuses(after) == [FINE, FINE, NOT_CHECKED, FINE]
    assert after.ok
    assert after.loss.reason is not None and "DataLoader" in after.loss.reason
    assert after.notes == ("1 elements of the captured gradient of output 0 are not finite; 1 stands for them",)


# It is the captured step -------------------------------------------------------------------------------------


def test_the_step_has_the_captured_weights_buffers_batch_and_random_numbers(tmp_path: Path) -> None:
    loss = tmp_path / "loss"
    noted = f"pathlib.Path({str(loss)!r}).write_text(loss.item().hex())"
    text = (SCRIPTS / "labels.py").read_text().replace("import sys", "import pathlib, sys")  # dropout, batch norm
    script = a_script(tmp_path, text.replace("optimizer.zero_grad()", noted))
    captured = failing_step(script, "loss", at_step=2)
    assert captured.loss is not None
    save(tmp_path / "c", captured, GIB)
    loss.unlink()
    other_seed = a_script(tmp_path, script.read_text().replace("torch.manual_seed(0)", "torch.manual_seed(77)"))
    gradtrace.recheck(tmp_path / "c", other_seed)
    assert loss.read_text() == captured.loss.hex()


def test_an_encoder_and_a_decoder_both_get_their_weights(tmp_path: Path) -> None:
    loss = tmp_path / "loss"
    parts = "encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 2)\n"
    loop = LOOP.replace("model(x)", "decoder(encoder(x))").replace("model.", "decoder.")
    noted = f"import pathlib; pathlib.Path({str(loss)!r}).write_text(loss.item().hex())"
    encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 2)
    x, y = torch.randn(2, 3), torch.randn(2, 2)
    kept = keep(decoder, encoder(x), label="decoder")
    by_hand(tmp_path / "c", kept, [x, y], roots=[Root(encoder, "encoder", "encoder"), kept.entry.root])
    assert gradtrace.recheck(
        tmp_path / "c", a_script(tmp_path, HEAD + parts + loop.replace("decoder.zero_grad()", noted))
    ).ok
    assert loss.read_text() == (decoder(encoder(x)) - y).square().mean().item().hex()


def test_an_evaluation_before_the_training_is_not_the_step(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    evaluation = """
model.eval()
for x, y in DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8, 2)), batch_size=1):
    model(x)
model.train()
"""
    result = gradtrace.recheck(capsule, a_script(tmp_path, TRAINING.replace(LOOP, evaluation + LOOP)))
    assert result.ok


def test_the_call_is_found_by_its_number_after_the_batch(tmp_path: Path) -> None:
    said = tmp_path / "said"
    text = f"""{HEAD}
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 2)), batch_size=2):
    for part in (1, 2):
        loss = (model(x * part) - y).square().mean()
        loss.backward()
        with open({str(said)!r}, "a") as file:
            print(part, model.weight.sum().item(), file=file)
        optimizer.step()
"""
    batch = [torch.ones(2, 3), torch.ones(2, 2)]
    model = nn.Linear(3, 2)
    by_hand(tmp_path / "c", keep(model, batch[0]), batch, number=1)
    assert gradtrace.recheck(tmp_path / "c", a_script(tmp_path, text)).ok
    # The first optimizer step was the script's own; the call after it has the captured weights again.
    weights = model.weight.sum().item()
    assert said.read_text().splitlines() == [f"1 {weights}", f"2 {weights}"]
    by_hand(tmp_path / "c", keep(model, batch[0]), batch, number=9)
    assert error(tmp_path / "c", a_script(tmp_path, text)) == (
        "after a batch model is called 2 times; the captured call is number 10"
    )


def test_a_root_without_its_variable_s_name_is_found_by_its_class(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    assert gradtrace.recheck(capsule, a_script(tmp_path, TRAINING.replace("model", "network"))).ok


# Where the script is stopped ---------------------------------------------------------------------------------


def test_nothing_that_the_script_does_changes_the_answer(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    ran = tmp_path / "ran"
    stubborn = with_optimizer(LOOP).replace(
        "    optimizer.step()", "    try:\n        optimizer.step()\n    except BaseException:\n        pass"
    )
    lines = "\n".join(f"    {line}" for line in stubborn.splitlines())
    text = f"""{HEAD}
import atexit, pathlib, os
atexit.register(lambda: pathlib.Path({str(ran)!r}).touch())
model = nn.Linear(3, 2)
try:
{lines}
    pathlib.Path({str(ran)!r}).touch()
except BaseException:
    os._exit(9)
finally:
    pathlib.Path({str(ran)!r}).touch()
"""
    assert gradtrace.recheck(capsule, a_script(tmp_path, text)).ok
    assert not ran.exists()


def test_without_an_optimizer_of_torch_s_it_stops_at_the_next_batch(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    steps = tmp_path / "steps"
    update = f"loss.backward()\n    print('updated', file=open({str(steps)!r}, 'a'))"
    text = TRAINING.replace("loss.backward()", update).replace("batch_size=2", "batch_size=2, num_workers=2")
    assert gradtrace.recheck(capsule, a_script(tmp_path, text)).ok
    assert steps.read_text().split() == ["updated"]


def test_the_gradients_of_a_grad_scaler_are_those_of_the_scaled_loss(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    text = with_optimizer(TRAINING).replace("loss.backward()", "scaler.scale(4 * loss + 4).backward()")
    text = text.replace("optimizer.step()", "scaler.step(optimizer); scaler.update(); sys.exit('too far')")
    scaler = "scaler = torch.amp.GradScaler('cpu', init_scale=SCALE)\nmodel ="
    fine = gradtrace.recheck(capsule, a_script(tmp_path, text.replace("model =", scaler.replace("SCALE", "8.0"))))
    assert fine.ok
    too_much = gradtrace.recheck(
        capsule, a_script(tmp_path, text.replace("model =", scaler.replace("SCALE", "2.0**127")))
    )
    assert statuses(too_much)[2:] == [BAD, BAD]


def test_a_batch_that_the_script_skips_is_not_mended(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    result = gradtrace.recheck(capsule, a_script(tmp_path, TRAINING.replace("    model.zero_grad()", "    continue")))
    assert statuses(result) == [FINE, FINE, NOT_CHECKED, NOT_CHECKED]
    assert result.loss.reason == "backward() was not called"
    assert not result.ok


def test_the_end_of_the_script_is_an_end_too(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    assert gradtrace.recheck(capsule, a_script(tmp_path, f"{TRAINING}    break")).ok


# What is said of it ------------------------------------------------------------------------------------------


def test_a_module_in_another_mode_is_noted_and_left_so(tmp_path: Path) -> None:
    model = "model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))\n"
    capsule = a_capsule(tmp_path, HEAD + model + LOOP)
    result = gradtrace.recheck(capsule, a_script(tmp_path, HEAD + model + "model[1].eval()\n" + LOOP))
    assert result.ok
    assert "in another mode (train or eval) than when captured: 1" in result.notes


def test_a_script_that_changes_the_batch_on_its_way_is_noted(tmp_path: Path) -> None:
    capsule = a_capsule(tmp_path)
    result = gradtrace.recheck(capsule, a_script(tmp_path, TRAINING.replace("model(x)", "model(x + 1)")))
    assert result.ok
    assert result.notes == ("the batch is the captured one, what the script makes of it for the model is not",)


def test_nan_in_the_batch_is_the_input_s_until_the_script_cleans_it(tmp_path: Path) -> None:
    bad = TRAINING.replace("torch.randn(8, 3)", "torch.full((8, 3), float('nan'))")
    capsule = a_capsule(tmp_path, bad)
    before = gradtrace.recheck(capsule, a_script(tmp_path, bad))
    assert statuses(before) == [BAD] * 4
    assert before.input.boundary == "(root) Linear, input 0: 6 nan of 6"
    assert before.notes == ("the captured batch is not finite at 0: 6 nan of 6",)
    after = gradtrace.recheck(capsule, a_script(tmp_path, bad.replace("model(x)", "model(x.nan_to_num())")))
    assert after.ok


def test_infinities_of_a_mask_are_no_failure_unless_something_comes_of_them(tmp_path: Path) -> None:
    masked = """
class Mask(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.arange(3) >= KEPT, float("-inf"))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.linear = Mask(), nn.Linear(3, 2)
    def forward(self, x):
        return self.linear(self.mask(x).softmax(-1))
model = Model()
"""
    capsule = a_capsule(tmp_path, HEAD + masked.replace("KEPT", "2") + LOOP)
    fine = gradtrace.recheck(capsule, a_script(tmp_path, HEAD + masked.replace("KEPT", "2") + LOOP))
    assert fine.ok
    all_masked = gradtrace.recheck(capsule, a_script(tmp_path, HEAD + masked.replace("KEPT", "0") + LOOP))
    assert all_masked.forward.boundary == "mask (Mask), output 0: 6 -inf of 6"
    assert not all_masked.ok


def test_asking_costs_the_asking_process_no_torch() -> None:
    code = "import sys, gradtrace; gradtrace.recheck; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0
