"""Rotary positions, for scorers that look behind them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "*n D"],
    positions: Int[Array, "*n"],
    frequencies: Float[Array, " D/2"],
    *,
    inverse: bool = False,
) -> Float[Array, "*n D"]:
    """x turned to its position (half-split layout), or with `inverse` back to position 0.

    Float32. Empty slots (position -1) are left as they are.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    frequencies = frequencies.reshape((1,) * (first.ndim - 1) + (-1,))
    angles = jnp.maximum(positions, 0)[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    sin = -sin if inverse else sin
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
