"""Column sums of attention with every weight in memory: the definition."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW, visible


def column_attention(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> Float[Array, "B H S"]:
    """sum over queries of exp(q k^T / sqrt(D) - lse), visible pairs only, in float32.

    `lse` is the log-sum-exp over everything the query attended to, which may be more than these
    keys; queries with lse -inf contribute nothing.
    """
    batch, heads, num_queries, size = queries.shape
    kv_heads = keys.shape[1]
    split = (batch, kv_heads, heads // kv_heads, num_queries)
    logits = jnp.einsum(
        "bkrd,bksd->bkrs",
        queries.reshape(batch, kv_heads, -1, size),
        keys,
        preferred_element_type=jnp.float32,
    ) * jnp.float32(size**-0.5)
    seen = visible(query_positions[:, None], key_positions, window)[:, :, None]
    total = jnp.maximum(lse, -1e30).reshape(*split, 1)
    weights = jnp.exp(jnp.where(seen, logits.reshape(*split, -1) - total, -jnp.inf))
    return jnp.sum(weights, axis=3).reshape(batch, heads, -1)
