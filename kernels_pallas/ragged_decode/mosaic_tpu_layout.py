"""How decode attention's operands and results lie on a TPU, and what is not served."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kernels_pallas.ragged_decode import rows

LANES = 128
_TILE = 256  # rows of queries
_BUFFER_BYTES = 2**19  # of a block of keys; four of these lie in VMEM


def check(queries: Array, keys: Array) -> None:
    dtype = keys.dtype
    if dtype not in (jnp.bfloat16, jnp.float32) or queries.dtype != dtype:
        raise NotImplementedError(
            f"queries in {queries.dtype} over keys in {dtype}: allowed are bfloat16 and float32, "
            "the same for both"
        )
    if keys.shape[-1] % 8 or keys.shape[-1] > 256:
        raise NotImplementedError(
            f"head size {keys.shape[-1]}: allowed are multiples of 8 up to 256"
        )


def block(size: int, dtype: Any) -> int:
    """Slots of a block: a multiple of the lanes, and few enough for four of them in VMEM."""
    lanes = -(-size // LANES) * LANES
    return max(LANES, min(1024, _BUFFER_BYTES // (lanes * jnp.dtype(dtype).itemsize)))


def tiled(
    queries: Array, query_positions: Array, kv_heads: int, window: Any, with_logits: bool
) -> tuple[Array, Array, int, int]:
    """Rows of queries [B, K, R, D], what they see [B, R, 2], rows per tile, and rows that count."""
    wanted = queries.shape[1] // kv_heads * queries.shape[2]
    if with_logits and wanted > 8:
        raise NotImplementedError(
            f"logits of {wanted} queries per KV head: allowed are up to 8, beyond that a second "
            "pass over the keys moves fewer bytes"
        )
    packed = 8 * (4 // queries.dtype.itemsize)
    tile = min(_TILE, -(-wanted // packed) * packed)
    grouped = rows.query_rows(queries, kv_heads, tile)
    ranges = rows.row_ranges(query_positions, queries.shape[1] // kv_heads, window, tile)
    return grouped, jnp.stack(ranges, axis=-1), tile, wanted


def results(grouped: Array) -> list[jax.ShapeDtypeStruct]:
    lse = (*grouped.shape[:3], 1)
    return [
        jax.ShapeDtypeStruct(grouped.shape, grouped.dtype),
        jax.ShapeDtypeStruct(lse, jnp.float32),
    ]


def unpacked(
    found: Any, queries: Array, lengths: Array, slots: int, wanted: int
) -> tuple[Any, ...]:
    out, lse, *logits = found
    result = rows.from_rows(out, lse[..., 0], queries)
    if not logits:
        return *result, None
    given = logits[0][:, :, :wanted]
    return *result, rows.logits_from_rows(given, lengths, queries.shape[1], slots)
