"""How far two statistics of the same boundary may lie apart: relative tolerances by dtype.

Two runs that compute the same in another order agree up to rounding, and rounding errors grow on their way through a
model and through the steps. The default tolerance is the square root of the dtype's machine epsilon: half of the digits
must agree. That is the usual choice where nothing is known of the problem; float32's rounding errors may grow by a
factor of 2,900, and a dozen roundings of bfloat16 still fit in. Integers, such as token ids, must be equal.

What a difference is relative to:

* min and max: the largest magnitude in either tensor, so that noise around zero in a tensor of ordinary size is none;
* norm: the larger norm;
* for a parameter's gradient, in both cases the largest among the gradients of that module: one that is zero but for
  rounding (the bias of attention's keys, a bias before a batch norm) stands beside one that is not.

Where the coarsest types of the runs differ, or their devices, the rounding of the coarsest reaches boundaries that hold
a finer one (autocast's float32 layers behind bfloat16 ones). The tolerance of all is then that of the coarsest type in
either run.
"""

from __future__ import annotations

import math
from collections.abc import Collection

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def is_exact(dtype: str) -> bool:
    """Whether values of the type are never rounded."""
    return dtype == "bool" or dtype.lstrip("u").startswith("int")


def default_tolerance(dtype: str) -> float:
    """Return the relative tolerance of a type by torch's name, 0 for integers; a type not known is like float32."""
    if is_exact(dtype):
        return 0.0
    return math.sqrt(_EPSILON.get(_PARTS.get(dtype, dtype), _EPSILON["float32"]))


def tolerances(
    a: Collection[tuple[str, str]], b: Collection[tuple[str, str]], rtol: float | None = None
) -> dict[str, float]:
    """Return the tolerance of each type in two runs, of which the (dtype, device) pairs are given.

    ``rtol`` takes the place of the defaults, but for integers.
    """
    dtypes = sorted({dtype for dtype, _ in (*a, *b)})
    if rtol is not None:
        return {dtype: 0.0 if is_exact(dtype) else rtol for dtype in dtypes}
    own = {dtype: default_tolerance(dtype) for dtype in dtypes}
    coarsest_a, coarsest_b = (max((own[dtype] for dtype, _ in kinds), default=0.0) for kinds in (a, b))
    if coarsest_a == coarsest_b and {device for _, device in a} == {device for _, device in b}:
        return own
    coarsest = max(coarsest_a, coarsest_b)
    return {dtype: coarsest if tolerance else 0.0 for dtype, tolerance in own.items()}
