"""Dispatch of column attention."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.column_attention import blockwise, reference


def column_attention(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    implementation: Literal["reference", "blockwise"] | None = None,
) -> Float[Array, "B H S"]:
    """Sum over queries of their softmax weight on each slot, given their log-sum-exp."""
    if implementation is None:
        dense = queries.shape[2] * keys.shape[2] <= 2**17
        implementation = "reference" if dense else "blockwise"
    chosen = reference if implementation == "reference" else blockwise
    return chosen.column_attention(queries, lse, keys, query_positions, key_positions, window)
