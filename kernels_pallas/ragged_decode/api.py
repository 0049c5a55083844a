"""Dispatch of paged attention."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW, attention
from kernels_pallas.ragged_decode import reference, split


def paged_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    implementation: Literal["reference", "split"] | None = None,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """Attention over the first `lengths` slots of each head's pages: output and log-sum-exp.

    `implementation` None takes the page-proportional split for up to 8 queries; more queries
    share the cost of gathering the pages once.
    """
    args = (queries, keys, values, positions, page_table, lengths, query_positions, window)
    if implementation == "reference":
        return reference.paged_attention(*args)
    if implementation == "split" or queries.shape[2] <= 8:
        return split.paged_attention(*args)
    slots = reference.slot_positions(positions, page_table, lengths)
    gathered_keys = reference.gather_pages(keys, page_table)
    gathered_values = reference.gather_pages(values, page_table)
    return attention(queries, gathered_keys, gathered_values, query_positions, slots, window)
