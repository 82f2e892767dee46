"""Two ranks under torchrun, each way of sharing a model: the rank that made the value, the module, the operation."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import gradtrace
from tests.integrations.running import SCRIPTS, run, verdict_on

SCRIPT = str(SCRIPTS / "gpt_ranks.py")


def launch(folder: Path, *command: str, restarts: int = 0, expected: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command of Python on two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--nproc-per-node", "2", "--master-port", str(port), "--max-restarts", str(restarts))
    return run("-m", "torch.distributed.run", *options, *command, cwd=folder, expected=expected)


def recorded(folder: Path, *options: str, script: tuple[str, ...] = (), **launching: int) -> dict[str, Any]:
    """Record the script on two ranks; return the verdict."""
    launch(folder, "-m", "gradtrace", "record", *options, SCRIPT, *script, **launching)
    return verdict_on(folder)


def recorded_as_natively(folder: Path, wrap: str) -> dict[str, Any]:
    """Run the script and record it, with the same losses on all ranks; return the verdict."""
    native = launch(folder, SCRIPT, "--wrap", wrap)
    observed = launch(folder, "-m", "gradtrace", "record", SCRIPT, "--wrap", wrap)
    assert len(losses(native.stdout)) == 8
    assert losses(observed.stdout) == losses(native.stdout)
    return verdict_on(folder)


def losses(printed: str) -> list[str]:
    return sorted(re.findall(r"rank \d step \d loss \S+", printed))


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with gradtrace.open_run(folder / "run.parquet") as opened:
        return opened.sql(query).rows


def test_what_ddp_spreads_was_made_on_one_rank_by_one_operation(tmp_path: Path) -> None:
    found = recorded_as_natively(tmp_path, "ddp")
    assert_made_by_the_division(found)
    text = run("-m", "gradtrace", "first-nan", "run.parquet", cwd=tmp_path).stdout
    assert text.startswith("First non-finite value: step 2, rank 1, forward, blocks.0.attention (Attention), output 0")
    assert re.search(r"^  made by +DivBackward0 \(nan\)", text, flags=re.MULTILINE)
    assert re.search(r"^  received +by rank 0$", text, flags=re.MULTILINE)


def test_a_rank_that_was_only_watched_replays_its_step_alone(tmp_path: Path) -> None:
    assert_made_by_the_division(recorded(tmp_path, "--watch", "--watch-first", "0"))


def assert_made_by_the_division(found: dict[str, Any]) -> None:
    assert (found["step"], found["rank"], found["received_by"]) == (2, 1, [0])
    assert (found["phase"], found["module"], found["op"]) == ("forward", "blocks.0.attention", "DivBackward0")
    assert found["location"]["code"] == "weights = weights / weights.sum(-1, keepdim=True)"
    assert found["confirmation"]["status"] == "reproduced"
    assert found["reached"] == ["loss", "grad", "param"]


def assert_made_by_attention(found: dict[str, Any], folder: Path, by: str) -> None:
    assert (found["step"], found["rank"], found["phase"], found["op"]) == (2, 1, "forward", None)
    assert found["module"] == "blocks.0.attention"
    assert found["confirmation"]["status"] == "not_replayed"
    assert found["confirmation"]["reason"] == f"the model's parameters are sharded ({by})"
    assert not list(folder.rglob("*.capsule.pt"))


def test_of_a_model_under_fsdp2_rank_and_module_are_known_and_each_rank_records_its_shards(tmp_path: Path) -> None:
    found = recorded_as_natively(tmp_path, "fsdp2")
    assert_made_by_attention(found, tmp_path, "DTensor")
    assert found["received_by"] == [0]
    text = run("-m", "gradtrace", "first-nan", "run.parquet", cwd=tmp_path).stdout
    assert text.startswith("First non-finite value: step 2, rank 1, forward, blocks.0.attention (Attention), output 0")
    query = """
        SELECT DISTINCT tensor, path, shape, numel, detail FROM records
        WHERE step = 1 AND module = 'blocks.0.up' AND tensor IN ('param', 'grad')"""
    shards = {("weight", "[128, 32]", 2048, "local shard [64, 32]"), ("bias", "[128]", 64, "local shard [64]")}
    assert set(rows(tmp_path, query)) == {(tensor, *shard) for tensor in ("param", "grad") for shard in shards}


def test_of_a_model_under_fsdp1_rank_and_module_are_known(tmp_path: Path) -> None:
    found = recorded_as_natively(tmp_path, "fsdp1")
    assert_made_by_attention(found, tmp_path, "FullyShardedDataParallel")
    assert found["received_by"] == [0]


def test_tensor_parallel_ranks_receive_in_the_forward_pass(tmp_path: Path) -> None:
    found = recorded_as_natively(tmp_path, "tensor")
    assert_made_by_attention(found, tmp_path, "DTensor")
    [other] = found["candidates"]
    assert other["module"] == "blocks.0"
    assert other["why"].startswith("rank 0 made a non-finite value of its own in the same step, or received it there")


def test_of_a_rank_that_dies_everything_before_is_read(tmp_path: Path) -> None:
    found = recorded(tmp_path, script=("--die-at", "3"), expected=1)
    assert (found["step"], found["rank"], found["module"]) == (2, 1, "blocks.0.attention")
    assert (tmp_path / "run.parquet" / "rank-1.parquet.parts").is_dir()
    assert "rank 1: the step after 2 was in flight when the run was killed" in found["run"]["missing"]
    assert {step for (step,) in rows(tmp_path, "SELECT DISTINCT step FROM records WHERE rank = 1")} == {0, 1, 2}


def test_attempts_of_an_elastic_launch_never_mix(tmp_path: Path) -> None:
    # Without a process group: gloo does not always come up again after a rank has been killed.
    found = recorded(tmp_path, script=("--wrap", "none", "--die-at", "1"), restarts=1)
    assert (found["step"], found["rank"], found["op"]) == (2, 1, "DivBackward0")
    assert found["run"]["missing"][0].startswith("earlier attempts are left out: rank-0.parquet, rank-1.parquet")
    assert {step for (step,) in rows(tmp_path, "SELECT DISTINCT step FROM records")} == {0, 1, 2, 3}
    whole = "SELECT count(*) FROM records WHERE tensor = 'loss' GROUP BY rank, step"
    assert set(rows(tmp_path, whole)) == {(1,)}
