"""Column sums of attention in blocks: memory linear in Q and S, unseen blocks skipped."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import block_bounds, pad_to, visible_range
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.column_attention import reference


def column_attention(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    block: int = 256,
) -> Float[Array, "B H S"]:
    """As the reference, one (query block, key block) tile at a time."""
    slots = keys.shape[2]
    query_block, key_block = min(block, queries.shape[2]), min(block, slots)
    queries = pad_to(queries, query_block, 2)
    lse = pad_to(lse, query_block, 2)
    query_positions = pad_to(query_positions, query_block, 1, fill=-1)
    keys = pad_to(keys, key_block, 2)
    key_positions = pad_to(key_positions, key_block, 2, fill=-1)
    bounds = block_bounds(key_positions, key_block)

    def query_step(total: Array, start: Array) -> tuple[Array, None]:
        q = lax.dynamic_slice_in_dim(queries, start, query_block, axis=2)
        row_lse = lax.dynamic_slice_in_dim(lse, start, query_block, axis=2)
        positions = lax.dynamic_slice_in_dim(query_positions, start, query_block, axis=1)

        def key_step(index: Array, total: Array) -> Array:
            at = index * key_block
            k = lax.dynamic_slice_in_dim(keys, at, key_block, axis=2)
            slot = lax.dynamic_slice_in_dim(key_positions, at, key_block, axis=2)
            tile = reference.column_attention(q, row_lse, k, positions, slot, window)
            old = lax.dynamic_slice_in_dim(total, at, key_block, axis=2)
            return lax.dynamic_update_slice_in_dim(total, old + tile, at, axis=2)

        first, last = visible_range(bounds, positions, window)
        return lax.fori_loop(first, last, key_step, total), None

    zeros = jnp.zeros((*queries.shape[:2], keys.shape[2]), jnp.float32)
    starts = jnp.arange(0, queries.shape[2], query_block)
    total, _ = lax.scan(query_step, zeros, starts)
    return total[:, :, :slots]
