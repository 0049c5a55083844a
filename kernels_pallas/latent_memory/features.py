"""phi, the features under which a latent memory files entries."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

# The state outlives its inputs by many cuts: products in full float32 on every platform.
product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def normalised(x: Float32[Array, "*n M"], normalise: bool) -> Float32[Array, "*n M"]:
    """x / sqrt(mean of x^2 + 1e-6), or x."""
    if not normalise:
        return x
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def token_ranks(
    positions: Int[Array, "B K S"], evicted: Bool[Array, "B K S"]
) -> Int[Array, "B K S"]:
    """The rank of each evicted entry's position among those of its row's evicted entries."""
    batch = positions.shape[0]
    at = jnp.where(evicted, positions, jnp.iinfo(jnp.int32).max).reshape(batch, -1)
    order = jnp.argsort(at, axis=1)
    ordered = jnp.take_along_axis(at, order, axis=1)
    is_next = jnp.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)))
    rank = jnp.cumsum(is_next, axis=1, dtype=jnp.int32)
    row = jnp.arange(batch)[:, None]
    return jnp.zeros_like(rank).at[row, order].set(rank).reshape(positions.shape)
