"""The Triton kernel behind ``capture/fused.py``. Importing this module needs Triton; nothing else may live here.

One launch a tensor, whatever its size: each program adds up every ``num_programs``-th block in registers, and
then puts its six partial numbers into the tensor's row by atomics, so that no second launch has to combine them.
Counts, minimum and maximum come out the same whatever order the programs finish in. The sum of squares of
doubles would not; so each partial sum is rounded to 24 significant bits first. Up to 1,024 such numbers add up
without any rounding as long as none is more than 2**19 times another, and what smaller ones lose is at most about
1e-13 of the sum. ``fused.fetch`` rounds the norm to 24 bits again, which hides that: two runs over equal tensors
give the same norm, but for a chance of about one in a million where magnitudes are very uneven.

The squares are taken as doubles: those of float32 neither overflow nor vanish there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row"])  # type: ignore[untyped-decorator]
def measure(values, numel, rows, row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Put the numbers of ``numel`` elements at ``values`` into row ``row`` of ``rows``, six doubles wide.

    A row is nan, posinf, neginf, min, max and the sum of squares of the finite elements, and has to hold
    0, 0, 0, +Inf, -Inf, 0 before.
    """
    infinity = float("inf")
    lanes = tl.arange(0, BLOCK)
    nan = tl.full([BLOCK], 0, tl.int32)
    posinf = tl.full([BLOCK], 0, tl.int32)
    neginf = tl.full([BLOCK], 0, tl.int32)
    low = tl.full([BLOCK], infinity, tl.float32)
    high = tl.full([BLOCK], -infinity, tl.float32)
    squares = tl.full([BLOCK], 0, tl.float64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(first, numel, stride):
        places = start + lanes
        there = places < numel
        value = tl.load(values + places, mask=there, other=0.0)
        if values.dtype.element_ty == tl.bfloat16:
            # The upper half of a float32. Said in bits, for the interpreter's own way takes denormals for zero.
            value = (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            value = value.to(tl.float32)
        finite = tl.abs(value) < infinity
        nan += (value != value).to(tl.int32)
        posinf += (value == infinity).to(tl.int32)
        neginf += (value == -infinity).to(tl.int32)
        low = tl.minimum(low, tl.where(there & finite, value, infinity))
        high = tl.maximum(high, tl.where(there & finite, value, -infinity))
        wide = tl.where(finite, value, 0.0).to(tl.float64)
        squares += wide * wide

    place = rows + row * 6
    nans = tl.sum(nan.to(tl.int64), axis=0)
    posinfs = tl.sum(posinf.to(tl.int64), axis=0)
    neginfs = tl.sum(neginf.to(tl.int64), axis=0)
    tl.atomic_add(place, nans.to(tl.float64), mask=nans > 0, sem="relaxed")
    tl.atomic_add(place + 1, posinfs.to(tl.float64), mask=posinfs > 0, sem="relaxed")
    tl.atomic_add(place + 2, neginfs.to(tl.float64), mask=neginfs > 0, sem="relaxed")
    # Atomic minimum and maximum look at the sign bit, and in older releases of Triton went wrong on -0.0. They
    # never see a NaN here.
    lowest = tl.min(low, axis=0)
    highest = tl.max(high, axis=0)
    tl.atomic_min(place + 3, tl.where(lowest == 0, 0.0, lowest).to(tl.float64), sem="relaxed")
    tl.atomic_max(place + 4, tl.where(highest == 0, 0.0, highest).to(tl.float64), sem="relaxed")
    bits = tl.sum(squares, axis=0).to(tl.int64, bitcast=True)
    rounded = (bits + (1 << 28)) & -(1 << 29)
    tl.atomic_add(place + 5, rounded.to(tl.float64, bitcast=True), sem="relaxed")
