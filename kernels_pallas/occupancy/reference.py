"""Soft cache occupancy, every retention in memory: the definition."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.occupancy.sampled import sampled
from kernels_pallas.retention_attention.segments import tokens, visible


def occupancy(
    log_beta: Float[Array, "B N T"], segments: Int[Array, "B T"]
) -> Float[Array, "B N T"]:
    """S(t) = sum over i <= t in t's segment of exp((t - i) log_beta_i), 0 at padding."""
    everywhere = jnp.broadcast_to(jnp.arange(segments.shape[1])[None], segments.shape)
    return occupancy_at(log_beta, segments, everywhere)


def occupancy_at(
    log_beta: Float[Array, "B N T"], segments: Int[Array, "B T"], at: Int[Array, "B P"]
) -> Float[Array, "B N P"]:
    """S at the indices `at`, 0 where they are negative or at padding."""
    asking, held = sampled(segments, at), tokens(segments)
    seen = visible(asking, held)[:, None]
    age = (asking.positions[:, :, None] - held.positions[:, None, :]).astype(jnp.float32)
    # The lowest finite number for -inf, of which age 0 would make NaN.
    decay = jnp.maximum(log_beta, jnp.finfo(jnp.float32).min)
    exponent = age[:, None] * decay[:, :, None]
    return jnp.sum(jnp.exp(jnp.where(seen, exponent, -jnp.inf)), axis=-1)
