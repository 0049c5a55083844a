"""Attention over positioned slots, every logit in memory: the definition, and the decode path."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW, visible


def attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """softmax(q k^T / sqrt(D)) v over visible slots, and the log-sum-exp of the visible logits.

    Query head h reads KV head h // (H / K). Softmax is in float32. A query that sees nothing
    gets output 0 and log-sum-exp -inf.
    """
    batch, heads, num_queries, size = queries.shape
    kv_heads, slots = keys.shape[1:3]
    split = (batch, kv_heads, heads // kv_heads, num_queries)
    # One axis for a KV head's rows: XLA's CPU matrix product is twice as slow with two.
    rows = (batch, kv_heads, heads // kv_heads * num_queries)
    logits = jnp.einsum(
        "bkrd,bksd->bkrs",
        queries.reshape(*rows, size),
        keys,
        preferred_element_type=jnp.float32,
    ) * jnp.float32(size**-0.5)
    seen = visible(query_positions[:, None], key_positions, window)[:, :, None]
    logits = jnp.where(seen, logits.reshape(*split, slots), -jnp.inf)
    # Whatever is subtracted and added again: a constant, for the log-sum-exp as for the weights.
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -1e30))
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum(
        "bkrs,bksd->bkrd",
        weights.astype(values.dtype).reshape(*rows, slots),
        values,
        preferred_element_type=jnp.float32,
    )
    out = out / jnp.maximum(total, 1e-30).reshape(*rows, 1)
    # The inner where keeps the gradient of queries that see nothing at 0 instead of NaN.
    some = total > 0
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + largest[..., 0], -jnp.inf)
    return (
        out.reshape(queries.shape).astype(queries.dtype),
        lse.reshape(batch, heads, num_queries),
    )
