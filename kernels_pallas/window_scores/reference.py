"""The meaning of windowed attention weights and of their reductions, in jnp."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

type OverQueries = Literal["mean", "sum", "max"]
type OverGroup = Literal["mean", "sum", "max"] | None


def window_attention_reference(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    *,
    window: int | Int[Array, ""] | None = None,
) -> Float[Array, "B H W S"]:
    """softmax over visible slots of q k^T / sqrt(D), in float32.

    A slot is visible when 0 <= position <= query position and, with a sliding `window`,
    position > query position - window.
    """
    batch, heads, count, head_dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    groups = heads // kv_heads
    # One matrix product per KV head: its whole query group shares the read of the keys.
    # "highest" because accelerators would otherwise round float32 operands before multiplying.
    logits = jnp.einsum(
        "bkqd,bksd->bkqs",
        queries.reshape(batch, kv_heads, groups * count, head_dim),
        keys,
        precision="highest",
        preferred_element_type=jnp.float32,
    ).reshape(batch, kv_heads, groups, count, slots)
    asked = query_positions[:, None, :, None]
    held = positions[:, :, None, :]
    visible = (held >= 0) & (held <= asked)
    if window is not None:
        visible &= held > asked - window
    logits = jnp.where(visible[:, :, None], logits * (head_dim**-0.5), -jnp.inf)
    # The finite initial value keeps rows that see nothing at 0 instead of NaN.
    highest = jnp.max(logits, axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    mass = jnp.exp(logits - jax.lax.stop_gradient(highest))
    total = jnp.sum(mass, axis=-1, keepdims=True)
    weights = mass * (1.0 / jnp.where(total > 0, total, 1.0))
    return weights.reshape(batch, heads, count, slots)


def window_scores(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    query_weights: Float[Array, "B W"] | None = None,
    *,
    over_queries: OverQueries = "mean",
    over_group: OverGroup = "mean",
    window: int | Int[Array, ""] | None = None,
) -> Float[Array, "B N S"]:
    """`window_attention`, reduced over the queries and then over the query heads of a KV head.

    "mean" over the queries is over those that are there. Sums and means share one sum over
    both axes, and are scaled once behind it.
    """
    weights = window_attention_reference(queries, keys, query_positions, positions, window=window)
    batch, heads, count, slots = weights.shape
    kv_heads = keys.shape[1]
    if query_weights is not None:
        weights = weights * query_weights[:, None, :, None]
    grouped = weights.reshape(batch, kv_heads, -1, count, slots)
    linear = over_group in ("sum", "mean") and over_queries != "max"
    if linear:
        rows = jnp.sum(grouped, axis=(2, 3))
    elif over_queries == "max":
        rows = jnp.max(grouped, axis=3)
    else:
        rows = jnp.sum(grouped, axis=3)
    if over_queries == "mean" or (linear and over_group == "mean"):
        asked = jnp.float32(1.0)
        if over_queries == "mean":
            present = jnp.sum(query_positions >= 0, axis=-1).astype(jnp.float32)
            asked = jnp.maximum(present, 1.0).reshape(-1, *(1,) * (rows.ndim - 1))
        share = 1.0 / (asked * (heads // kv_heads if linear and over_group == "mean" else 1))
        rows = rows * share
    if linear:
        return rows
    if over_group is None:
        return rows.reshape(batch, heads, slots)
    if over_group == "max":
        return jnp.max(rows, axis=2)
    return jnp.mean(rows, axis=2) if over_group == "mean" else jnp.sum(rows, axis=2)


def window_moments(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    *,
    window: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B H S"], Float[Array, "B H S"], Float[Array, "B H S"]]:
    """Mean, unbiased variance and -sum a log a of `window_attention` over the queries there are.

    A single query has variance 0.
    """
    weights = window_attention_reference(queries, keys, query_positions, positions, window=window)
    present = (query_positions >= 0).astype(jnp.float32)
    count = jnp.sum(present, axis=1)[:, None, None]
    mean = jnp.sum(weights, axis=2) / jnp.maximum(count, 1.0)
    # Two passes: the weights are small and their squares would cancel.
    squares = jnp.square(weights - mean[:, :, None]) * present[:, None, :, None]
    variance = jnp.sum(squares, axis=2) / jnp.maximum(count - 1.0, 1.0)
    own_log = jnp.where(weights > 0, jnp.log(jnp.maximum(weights, 1e-37)), 0.0)
    return mean, variance, -jnp.sum(weights * own_log, axis=2)
