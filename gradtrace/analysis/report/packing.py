"""Numbers as text for the page: float32, the bytes of equal weight together, deflated, base64.

The first bytes, sign and exponent, are much alike and deflate well; the last ones are noise, and where there are many
numbers they are left out. NULL becomes NaN, which no number of a trace is.
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

FULL = 4
"""Bytes of a float32."""

LARGEST = 3.38e38
"""What is beyond it is drawn as this: a larger float32, rounded, would be infinite."""


def pack(values: pa.ChunkedArray[Any], kept: int) -> str:
    """Return numbers with the ``kept`` first bytes of each, rounded."""
    import pyarrow as pa
    import pyarrow.compute

    compute: Any = pyarrow.compute  # which types it takes and gives, its stubs do not know
    numbers = compute.max_element_wise(values.cast(pa.float64()), -LARGEST, skip_nulls=False)
    numbers = compute.min_element_wise(numbers, LARGEST, skip_nulls=False)
    floats = compute.fill_null(numbers.cast(pa.float32()), float("nan"))
    bits = pa.concat_arrays([pa.array([], pa.float32()), *floats.chunks]).view(pa.uint32())
    if kept < FULL:
        bits = compute.add(bits, pa.scalar(1 << (8 * (FULL - kept) - 1), pa.uint32()))
    planes = [_byte(bits, 8 * (FULL - 1 - place)) for place in range(kept)]
    return base64.b64encode(zlib.compress(b"".join(planes), 6)).decode("ascii")


def _byte(bits: pa.UInt32Array, shift: int) -> bytes:
    import pyarrow as pa
    import pyarrow.compute as pc

    shifted = pc.bit_wise_and(pc.shift_right(bits, pa.scalar(shift, pa.uint32())), pa.scalar(0xFF, pa.uint32()))
    part = shifted.cast(pa.uint8())
    values = part.buffers()[1]
    assert values is not None  # these have no NULL
    data = values.to_pybytes()
    return data[part.offset : part.offset + len(part)]
