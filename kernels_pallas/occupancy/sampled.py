"""The tokens at sampled indices."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels_pallas.retention_attention.segments import Tokens, tokens


def sampled(segments: Int[Array, "B T"], at: Int[Array, "B P"]) -> Tokens:
    """Tokens at indices `at` of rows with these segments; absent where an index is negative."""
    there = at >= 0
    index = jnp.clip(at, 0, segments.shape[1] - 1)
    return Tokens(
        *(
            jnp.where(there, jnp.take_along_axis(array, index, axis=1), -1)
            for array in tokens(segments)
        )
    )
