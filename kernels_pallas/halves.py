"""float32 for bfloat16 tensor cores: a number as the sum of two that have 8 bits each.

Of a product (a + a') (b + b') the low halves' a' b' is left out. What is then missing of |a| |b| is
2^-16 at most, where one product in tf32 would be off by 2^-11.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def count(dtype: jnp.dtype) -> int:
    """Of `halves`."""
    return 2 if dtype == jnp.float32 else 1


def halves(array: Array) -> list[Array]:
    """float32 as the bfloat16 numbers of which it is the sum, the high ones first; others alone."""
    if count(array.dtype) == 1:
        return [array]
    # Not a cast there and back, which XLA leaves out.
    high = lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
    return [high.astype(jnp.bfloat16), (array - high).astype(jnp.bfloat16)]


def products(parts: int) -> list[tuple[int, int]]:
    """Which parts of one factor meet which of the other."""
    return [(a, b) for a in range(parts) for b in range(parts - a)]
