"""The order of entries as one integer: protected first, then score, then nothing but position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_PROTECTED = 0xFF800000  # above the key of every finite float


def order_key(
    scores: Float[Array, "*n"], rank: Int[Array, "*n"], valid: Bool[Array, "*n"]
) -> UInt32[Array, "*n"]:
    """uint32 key whose order is the order in which entries are kept.

    From the top: protected entries by `rank` (1 to 2**23 - 1); finite scores in float32 order
    (-0.0 equals 0.0); non-finite scores, key 1; empty slots, key 0.
    """
    scores = scores.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    # On the bits, because compilers drop the addition of 0.0 and may flush subnormal numbers.
    bits = jnp.where(bits == jnp.uint32(0x80000000), jnp.uint32(0), bits)
    key = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))
    key = jnp.where(jnp.isfinite(scores), key, jnp.uint32(1))
    key = jnp.where(rank > 0, jnp.uint32(_PROTECTED) + rank.astype(jnp.uint32), key)
    return jnp.where(valid, key, jnp.uint32(0))
