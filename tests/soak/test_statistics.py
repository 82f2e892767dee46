"""Hundreds of thousands of tensors, of every type, layout and content, against exact arithmetic."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from gradtrace.capture.statistics import Statistics
from tests.capture.test_statistics_fuzz import assert_right, check, measured
from tests.tensors import CONTENTS, FLOATS, LAYOUTS, SIZES, TYPES, Case, case, cases, expected, expected_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

TENSORS = 60_000
EXAMPLES = 5_000
LARGE = 16
INTERPRETED = 400
ROOT = Path(__file__).parents[2]


def random_case(choice: random.Random, types: tuple[torch.dtype, ...] = TYPES) -> Case:
    picked = (choice.choice(types), choice.choice(CONTENTS), choice.choice(LAYOUTS), choice.choice(SIZES))
    return case(*picked, choice.randrange(2**32))


def test_random_tensors_are_measured_as_exact_arithmetic_does(result: Any) -> None:
    choice = random.Random(20260101)
    seen: Counter[str] = Counter()
    for _ in range(TENSORS):
        one = random_case(choice)
        check(one)
        seen[str(one.tensor.dtype)] += 1
    result(
        "Tensors of every type, layout and content measured, against exact arithmetic",
        tensors=TENSORS, ways=2, types=len(seen), layouts=len(LAYOUTS), contents=len(CONTENTS), wrong=0,
    )  # fmt: skip


def test_hypothesis_finds_no_tensor_that_is_measured_wrong(result: Any) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(one=cases())
    def search(one: Case) -> None:
        check(one)

    search()
    result("Tensors that hypothesis has thought of, measured against exact arithmetic", examples=EXAMPLES, wrong=0)


def test_large_tensors_keep_their_precision(result: Any) -> None:
    """Millions of elements: the norm's rounding adds up, or does not."""
    worst = 0.0
    generator = torch.Generator().manual_seed(5)
    for number in range(LARGE):
        dtype = FLOATS[number % len(FLOATS)]
        base = torch.randn(3_000_001 + 7 * number, generator=generator).to(dtype)
        tensor = (base, base[::2], base[:3_000_000].view(1500, 2000).t(), base[1:].expand(2, -1))[number // 4 % 4]
        want = expected_of(tensor.double().flatten().tolist())
        for on_device in (False, True):
            measure = measured(tensor, on_device=on_device)
            assert (measure.nan, measure.posinf, measure.neginf, measure.min, measure.max) == want[:5]
            assert measure.norm is not None and want.norm is not None
            worst = max(worst, abs(measure.norm / want.norm - 1))
    assert worst < 3e-6
    result("Tensors of three to six million elements", tensors=LARGE, largest_error_of_a_norm=worst)


def interpreted() -> None:
    """Measure random tensors by the accelerator's kernel, in Triton's interpreter; print how many took it."""
    choice = random.Random(7)
    launched = 0
    for _ in range(INTERPRETED):
        one = random_case(choice, (torch.float16, torch.bfloat16, torch.float32))
        statistics = Statistics(on_device=True)
        with torch.no_grad():
            measure = statistics.measure(one.tensor)
            launched += bool(statistics._pending) and not isinstance(statistics._pending[0][0], torch.Tensor)
            statistics.resolve()
        assert_right(one, expected(one.dense), measure)
    print(json.dumps(launched))


def test_the_accelerators_kernel_measures_random_tensors_right(result: Any, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    program = "from tests.soak.test_statistics import interpreted; interpreted()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    launched = json.loads(done.stdout)
    assert launched > INTERPRETED // 4
    result("Random tensors measured by the kernel of the accelerator's way, interpreted", tensors=INTERPRETED,
           by_the_kernel=launched, wrong=0)  # fmt: skip
