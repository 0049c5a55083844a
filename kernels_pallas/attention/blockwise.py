"""Attention in blocks with an online softmax: memory linear in Q and S, unseen blocks skipped."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import block_bounds, pad_to, visible_range
from kernels_pallas.attention.gradient import differentiable
from kernels_pallas.attention.mask import NO_WINDOW, visible


def attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    query_block: int = 256,
    key_block: int = 256,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference.

    FlashAttention's recurrence (arXiv 2205.14135) per block of queries, over the range of key
    blocks that hold a visible position: with slots in position order that is the causal half.
    """
    forward = partial(_forward, query_block=query_block, key_block=key_block)
    # The key loop's length is data, which reverse mode refuses.
    return differentiable(forward)(
        queries, keys, values, query_positions, key_positions, jnp.asarray(window, jnp.int32)
    )


def _forward(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: Int[Array, ""],
    *,
    query_block: int,
    key_block: int,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    batch, heads, num_queries, size = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    query_block = min(query_block, num_queries)
    key_block = min(key_block, slots)

    queries = pad_to(queries * jnp.asarray(size**-0.5, queries.dtype), query_block, 2)
    query_positions = pad_to(query_positions, query_block, 1, fill=-1)
    keys, values = pad_to(keys, key_block, 2), pad_to(values, key_block, 2)
    key_positions = pad_to(key_positions, key_block, 2, fill=-1)
    bounds = block_bounds(key_positions, key_block)
    grouped = queries.reshape(batch, kv_heads, group, -1, size)

    def query_step(start: Array) -> tuple[Array, Array]:
        block = lax.dynamic_slice_in_dim(grouped, start, query_block, axis=3)
        block = block.reshape(batch, kv_heads, group * query_block, size)
        positions = lax.dynamic_slice_in_dim(query_positions, start, query_block, axis=1)

        def key_step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, out = carry
            at = index * key_block
            k = lax.dynamic_slice_in_dim(keys, at, key_block, axis=2)
            v = lax.dynamic_slice_in_dim(values, at, key_block, axis=2)
            slot = lax.dynamic_slice_in_dim(key_positions, at, key_block, axis=2)
            logits = jnp.einsum("bkqd,bksd->bkqs", block, k, preferred_element_type=jnp.float32)
            seen = visible(positions[:, None], slot, window)[:, :, None]
            shape = logits.shape
            logits = logits.reshape(batch, kv_heads, group, query_block, key_block)
            logits = jnp.where(seen, logits, -jnp.inf).reshape(shape)
            now = jnp.maximum(largest, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - now[..., None])
            shrink = jnp.exp(largest - now)
            add = jnp.einsum(
                "bkqs,bksd->bkqd",
                weights.astype(v.dtype),
                v,
                preferred_element_type=jnp.float32,
            )
            total = total * shrink + jnp.sum(weights, axis=-1)
            return now, total, out * shrink[..., None] + add

        rows = (batch, kv_heads, group * query_block)
        # A finite start keeps exp(-inf - start) at 0 for blocks in which nothing is visible.
        start_state = (
            jnp.full(rows, -1e30, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((*rows, size), jnp.float32),
        )
        first, last = visible_range(bounds, positions, window)
        largest, total, out = lax.fori_loop(first, last, key_step, start_state)
        out = out / jnp.maximum(total, 1e-30)[..., None]
        lse = jnp.log(total) + largest
        shape = (batch, heads, query_block)
        return out.reshape(*shape, size).astype(queries.dtype), lse.reshape(shape)

    starts = jnp.arange(0, query_positions.shape[1], query_block)
    with jax.named_scope("blockwise_attention"):
        out, lse = lax.map(query_step, starts)
    out = jnp.moveaxis(out, 0, 2).reshape(batch, heads, -1, size)
    lse = jnp.moveaxis(lse, 0, 2).reshape(batch, heads, -1)
    return out[:, :, :num_queries], lse[:, :, :num_queries]
