"""Mean and variance of attention over the queries of a window."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def window_moments(
    weights: Float[Array, "B H W S"], query_positions: Int[Array, "B W"]
) -> tuple[Float[Array, "B H S"], Float[Array, "B H S"]]:
    """Mean and unbiased variance over the rows that hold a query; a single row has variance 0."""
    present = (query_positions >= 0).astype(jnp.float32)
    count = jnp.sum(present, axis=1)[:, None, None]
    mean = jnp.sum(weights, axis=2) / jnp.maximum(count, 1.0)
    # Two passes: the weights are small and their squares would cancel.
    squares = jnp.square(weights - mean[:, :, None]) * present[:, None, :, None]
    return mean, jnp.sum(squares, axis=2) / jnp.maximum(count - 1.0, 1.0)
