"""Paged attention of many queries: every head's pages gathered once, then attention."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW, attention
from kernels_pallas.ragged_decode import reference


def paged_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference, dense or in blocks as `attention` chooses."""
    slots = reference.slot_positions(positions, page_table, lengths)
    gathered_keys = reference.gather_pages(keys, page_table)
    gathered_values = reference.gather_pages(values, page_table)
    return attention(queries, gathered_keys, gathered_values, query_positions, slots, window)
