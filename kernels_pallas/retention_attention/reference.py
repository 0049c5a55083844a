"""Attention under retention decay, every logit in memory: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.retention_attention.segments import tokens, visible


def retention_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> Float[Array, "B H T D"]:
    """softmax_j(q_i k_j / sqrt(D) + (i - j) log_beta_j) v_j over the j that i sees, in float32.

    Query head h reads KV head h // (H / K). Padding gets output 0.
    """
    return _attended(queries, keys, values, log_beta, segments, window)[0]


def segment_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """Attention without decay, and the log-sum-exp of its visible logits; padding: 0 and -inf."""
    still = jnp.zeros(keys.shape[:3], jnp.float32)
    return _attended(queries, keys, values, still, segments, window)


def _attended(
    queries: Array,
    keys: Array,
    values: Array,
    log_beta: Array,
    segments: Array,
    window: int | Array,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    batch, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    split = (batch, kv_heads, heads // kv_heads, length)
    logits = jnp.einsum(
        "bkgid,bkjd->bkgij",
        queries.reshape(*split, size).astype(jnp.float32),
        keys.astype(jnp.float32),
    ) * jnp.float32(size**-0.5)
    index = jnp.arange(length)
    age = (index[:, None] - index[None, :]).astype(jnp.float32)
    # The lowest finite number for -inf, of which age 0 would make NaN.
    decay = jnp.maximum(log_beta, jnp.finfo(jnp.float32).min)
    bias = age[None, None] * decay[:, :, None, :]
    everyone = tokens(segments)
    seen = visible(everyone, everyone, window)[:, None, None]
    logits = jnp.where(seen, logits + bias[:, :, None], -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -1e30))
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    share = weights / jnp.maximum(total, 1e-30)
    out = jnp.einsum("bkgij,bkjd->bkgid", share, values.astype(jnp.float32))
    lse = (jnp.log(total) + largest).reshape(queries.shape[:3])
    return out.reshape(queries.shape).astype(queries.dtype), lse
