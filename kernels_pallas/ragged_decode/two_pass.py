"""Attention, and with its log-sum-exp a second pass over the keys for each slot's mass."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.column_attention import column_attention
from kernels_pallas.ragged_decode import api, partials, reference


def decode_mass(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    others: Float[Array, "B H Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """As the reference, each pass by the implementation that serves it here."""
    slots = reference.filled(key_positions, lengths)
    out, lse = api.decode_attention(
        queries, keys, values, query_positions, key_positions, lengths, window
    )
    total = partials.total(lse, others)
    return out, lse, column_attention(queries, total, keys, query_positions, slots, window)


def paged_mass(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    others: Float[Array, "B H Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """As the reference, each pass by the implementation that serves it here."""
    slots = reference.slot_positions(positions, page_table, lengths)
    out, lse = api.paged_attention(
        queries, keys, values, positions, page_table, lengths, query_positions, window
    )
    total = partials.total(lse, others)
    gathered = reference.gather_pages(keys, page_table)
    return out, lse, column_attention(queries, total, gathered, query_positions, slots, window)
