"""Paged attention in work proportional to the pages in use, however uneven the heads are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW, visible
from kernels_pallas.select import kept_indices


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
    step: int = 16,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference. Every used page of every head is one item of a flat list.

    Items are attended `step` at a time, each leaving (maximum, sum, output) of its own; a
    segmented log-sum-exp merge per head finishes (flash-decoding's split over keys).
    """
    batch, kv_heads, pages = page_table.shape
    pool_pages, page, size = keys.shape[1:]
    group, count = queries.shape[1] // kv_heads, queries.shape[2]
    rows = group * count

    used = jnp.arange(pages, dtype=jnp.int32)[None, None] * page < lengths[..., None]
    limit = batch * min(kv_heads * pages, pool_pages)
    limit += -limit % step
    items, total = kept_indices(used.reshape(-1), limit)
    items = jnp.minimum(items, used.size - 1)
    heads = items // pages  # b * K + k
    ordinals = items % pages
    ids = heads // kv_heads * pool_pages + jnp.maximum(page_table.reshape(-1)[items], 0)

    flat_queries = queries.reshape(batch * kv_heads, rows, size)
    flat_queries = flat_queries * jnp.asarray(size**-0.5, queries.dtype)
    flat_keys, flat_values = keys.reshape(-1, page, size), values.reshape(-1, page, size)
    flat_positions, flat_lengths = positions.reshape(-1, page), lengths.reshape(-1)
    query_rows = jnp.broadcast_to(query_positions[:, None], (batch, group, count))
    query_rows = query_rows.reshape(batch, rows)

    def attend(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at = index * step
        head, ordinal, identity = (
            lax.dynamic_slice_in_dim(array, at, step) for array in (heads, ordinals, ids)
        )
        slot = flat_positions[identity]
        place = ordinal[:, None] * page + jnp.arange(page, dtype=jnp.int32)[None]
        slot = jnp.where(place < flat_lengths[head][:, None], slot, -1)
        seen = visible(query_rows[head // kv_heads], slot, window)
        logits = jnp.einsum(
            "nrd,npd->nrp",
            flat_queries[head],
            flat_keys[identity],
            preferred_element_type=jnp.float32,
        )
        logits = jnp.where(seen, logits, -jnp.inf)
        largest = jnp.maximum(jnp.max(logits, axis=-1), -1e30)
        weights = jnp.exp(logits - largest[..., None])
        out = jnp.einsum(
            "nrp,npd->nrd",
            weights.astype(values.dtype),
            flat_values[identity],
            preferred_element_type=jnp.float32,
        )
        put = lax.dynamic_update_slice_in_dim
        all_largest, all_sums, all_outs = carry
        return (
            put(all_largest, largest, at, axis=0),
            put(all_sums, jnp.sum(weights, axis=-1), at, axis=0),
            put(all_outs, out, at, axis=0),
        )

    empty = (
        jnp.full((limit, rows), -1e30, jnp.float32),
        jnp.zeros((limit, rows), jnp.float32),
        jnp.zeros((limit, rows, size), jnp.float32),
    )
    largest, sums, outs = lax.fori_loop(0, -(-total // step), attend, empty)

    # Items behind the last used one go to a segment of their own.
    segments = jnp.where(jnp.arange(limit) < total, heads, batch * kv_heads)
    number = batch * kv_heads + 1
    top = jnp.maximum(jax.ops.segment_max(largest, segments, number), -1e30)
    scale = jnp.exp(largest - top[segments])
    mass = jax.ops.segment_sum(sums * scale, segments, number)[:-1]
    out = jax.ops.segment_sum(outs * scale[..., None], segments, number)[:-1]
    out = out / jnp.maximum(mass, 1e-30)[..., None]
    lse = jnp.log(mass) + top[:-1]
    return out.reshape(queries.shape).astype(queries.dtype), lse.reshape(queries.shape[:3])
