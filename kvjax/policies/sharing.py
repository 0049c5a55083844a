"""Scores that all KV heads of a layer share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sum_over_heads(
    scores: Float[Array, "B K S"], positions: Int[Array, "B K S"]
) -> Float[Array, "B K S"]:
    """For each entry, the sum of the scores that its token has in all KV heads.

    Heads that evicted the token add nothing. Empty slots get 0.
    """
    scores = jnp.where(positions >= 0, scores, 0.0)

    def same_slots() -> Array:
        return jnp.broadcast_to(jnp.sum(scores, axis=1, keepdims=True), scores.shape)

    # Heads hold the same tokens unless their budgets differ; only then slots have to be matched.
    aligned = jnp.all(positions == positions[:, :1])
    total = jax.lax.cond(aligned, same_slots, lambda: jax.vmap(_sum_by_position)(scores, positions))
    return jnp.where(positions >= 0, total, 0.0)


def _sum_by_position(
    scores: Float[Array, "K S"], positions: Int[Array, "K S"]
) -> Float[Array, "K S"]:
    flat = positions.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ranked = flat[order]
    group_of_ranked = jnp.cumsum(ranked != jnp.roll(ranked, 1))
    group = jnp.zeros_like(flat).at[order].set(group_of_ranked.astype(flat.dtype))
    total = jax.ops.segment_sum(scores.reshape(-1), group, num_segments=flat.size + 1)
    return total[group].reshape(scores.shape)
