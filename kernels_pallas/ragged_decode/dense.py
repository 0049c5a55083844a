"""Decode attention over the whole capacity: what masks need not hide is small on a CPU."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW, attention
from kernels_pallas.ragged_decode import reference


def decode_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference, dense or in blocks as `attention` chooses."""
    slots = reference.filled(key_positions, lengths)
    return attention(queries, keys, values, query_positions, slots, window)
