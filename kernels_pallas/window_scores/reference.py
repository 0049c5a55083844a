"""The meaning of windowed attention weights, in jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
