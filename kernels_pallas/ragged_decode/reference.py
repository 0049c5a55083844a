"""Paged attention by gathering every head's pages: the definition."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.attention import reference as dense


def gather_pages(pool: Array, page_table: Int[Array, "B K M"]) -> Array:
    """The slots of each head in order: pool [B, N, P, ...] to [B, K, M * P, ...].

    Unused entries of the page table (-1) read page 0; callers mask them by length.
    """
    batch, heads, pages = page_table.shape
    rows = jnp.arange(batch)[:, None, None]
    taken = pool.at[rows, jnp.maximum(page_table, 0)].get(mode="promise_in_bounds")
    return taken.reshape(batch, heads, pages * pool.shape[2], *pool.shape[3:])


def slot_positions(
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
) -> Int[Array, "B K S"]:
    """Positions of the gathered slots, -1 from each head's length on."""
    slots = gather_pages(positions, page_table)
    place = jnp.arange(slots.shape[2], dtype=jnp.int32)[None, None]
    return jnp.where(place < lengths[..., None], slots, -1)


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
    """Attention over the first `lengths` slots of each head's pages: output and log-sum-exp."""
    return dense.attention(
        queries,
        gather_pages(keys, page_table),
        gather_pages(values, page_table),
        query_positions,
        slot_positions(positions, page_table, lengths),
        window,
    )
