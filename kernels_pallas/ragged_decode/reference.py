"""Attention over caches whose heads have lengths of their own, by masks: the definition."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.attention import reference as dense
from kernels_pallas.column_attention import reference as column
from kernels_pallas.ragged_decode import partials


def decode_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """Attention over the first `lengths` slots of each head: output and log-sum-exp."""
    slots = filled(key_positions, lengths)
    return dense.attention(queries, keys, values, query_positions, slots, window)


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
    """`decode_attention`, and each slot's softmax weight summed over the queries, float32.

    The softmax of the mass is over the slots and entries elsewhere of log-sum-exp `others`.
    """
    slots = filled(key_positions, lengths)
    out, lse = dense.attention(queries, keys, values, query_positions, slots, window)
    total = partials.total(lse, others)
    mass = column.column_attention(queries, total, keys, query_positions, slots, window)
    return out, lse, mass


def filled(key_positions: Int[Array, "B K S"], lengths: Int[Array, "B K"]) -> Int[Array, "B K S"]:
    """The positions with -1 from each head's length on."""
    place = jnp.arange(key_positions.shape[2], dtype=jnp.int32)[None, None]
    return jnp.where(place < lengths[..., None], key_positions, -1)


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
    return filled(gather_pages(positions, page_table), lengths)


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
    """`decode_mass` over pages, the mass in slot order, S = M * P."""
    gathered = gather_pages(keys, page_table), gather_pages(values, page_table)
    slots = slot_positions(positions, page_table, lengths)
    return decode_mass(queries, *gathered, query_positions, slots, lengths, others, window)
