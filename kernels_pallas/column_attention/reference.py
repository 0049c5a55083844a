"""Column statistics of attention with every weight in memory: the definition."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW, visible

type Statistic = Literal["sum", "mean", "max", "variance"]


def column_attention(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    statistic: Statistic = "sum",
) -> Float[Array, "B H S"]:
    """Of exp(q k^T / sqrt(D) - lse) over the queries that see a slot, in float32.

    `lse` is the log-sum-exp over everything the query attended to, which may be more than these
    keys; queries with lse -inf contribute nothing. "mean" and "variance" are over the queries
    that see the slot; the variance is unbiased, and 0 where a single one does. Slots that no
    query sees get 0.
    """
    weights, seen = column_weights(queries, lse, keys, query_positions, key_positions, window)
    shape = (*queries.shape[:2], keys.shape[2])
    if statistic == "max":
        return jnp.max(weights, axis=3).reshape(shape)
    total = jnp.sum(weights, axis=3)
    if statistic == "sum":
        return total.reshape(shape)
    count = jnp.sum(seen, axis=3, dtype=jnp.int32).astype(jnp.float32)
    mean = total / jnp.maximum(count, 1.0)
    if statistic == "mean":
        return mean.reshape(shape)
    # Two passes: the weights are small and their squares would cancel.
    squares = jnp.where(seen, jnp.square(weights - mean[:, :, :, None]), 0.0)
    return (jnp.sum(squares, axis=3) / jnp.maximum(count - 1.0, 1.0)).reshape(shape)


def column_weights(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""],
) -> tuple[Float[Array, "B K G Q S"], Bool[Array, "B K #G Q S"]]:
    """Every weight, 0 for pairs that do not see each other, and which pairs do."""
    batch, heads, num_queries, size = queries.shape
    kv_heads = keys.shape[1]
    split = (batch, kv_heads, heads // kv_heads, num_queries)
    logits = jnp.einsum(
        "bkrd,bksd->bkrs",
        queries.reshape(batch, kv_heads, -1, size),
        keys,
        precision="highest",
        preferred_element_type=jnp.float32,
    ) * jnp.float32(size**-0.5)
    seen = visible(query_positions[:, None], key_positions, window)[:, :, None]
    # Of a query that attended to nothing every weight is exp(-large) = 0.
    total = jnp.where(lse > -1e29, lse, 1e30).reshape(*split, 1)
    weights = jnp.exp(jnp.where(seen, logits.reshape(*split, -1) - total, -jnp.inf))
    return weights, seen
