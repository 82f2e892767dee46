"""Default tolerances, against the machine epsilons of numpy and of IEEE 754."""

from __future__ import annotations

import numpy as np
import pytest

from gradtrace.analysis.compare.tolerance import default_tolerance, tolerances


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_default_is_the_square_root_of_epsilon(dtype):
    assert default_tolerance(dtype) ** 2 == pytest.approx(float(np.finfo(dtype).eps), rel=1e-12)


def test_bfloat16_has_eight_bits_of_precision_and_a_complex_number_that_of_its_parts():
    assert default_tolerance("bfloat16") ** 2 == pytest.approx(2**-7)
    assert default_tolerance("complex64") == default_tolerance("float32")
    assert default_tolerance("complex128") == default_tolerance("float64")


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_integers_are_exact(dtype):
    assert default_tolerance(dtype) == 0.0
    assert tolerances([(dtype, "cpu")], [(dtype, "cpu")], rtol=0.5) == {dtype: 0.0}


def test_runs_alike_in_types_and_devices_have_a_tolerance_for_each_type():
    kinds = [("float32", "cuda:0"), ("bfloat16", "cuda:0")]
    assert tolerances(kinds, kinds[::-1]) == {"bfloat16": 2**-3.5, "float32": 2**-11.5}


@pytest.mark.parametrize("other", [[("float32", "cpu"), ("bfloat16", "cpu")], [("float32", "cuda:0")]])
def test_other_types_or_devices_spread_the_rounding_of_the_coarsest(other):
    kinds = [("float32", "cuda:0"), ("bfloat16", "cuda:0"), ("int64", "cuda:0")]
    assert tolerances(kinds, other) == {"bfloat16": 2**-3.5, "float32": 2**-3.5, "int64": 0.0}


def test_a_finer_type_in_one_run_alone_spreads_nothing():
    kinds = [("float32", "cpu")]
    assert tolerances(kinds, [*kinds, ("float64", "cpu")]) == {"float32": 2**-11.5, "float64": 2**-26}


def test_what_is_asked_for_takes_the_place_of_the_defaults():
    assert tolerances([("float32", "cpu")], [("bfloat16", "cpu")], rtol=0.0) == {"bfloat16": 0.0, "float32": 0.0}
