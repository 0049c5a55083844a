"""Attention sinks beside a sliding window: a matter of the positions that masks are made from."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def always_near(
    positions: Int[Array, "B *n"], query_positions: Int[Array, "B Q"], sinks: int
) -> Int[Array, "B *n"]:
    """Slots of the first `sinks` positions moved to where the row's first query is.

    Keys are rotated already, so positions do nothing but mask: from there a slot is in the window
    of all queries of the call, where these lie within one window of each other. A slot behind the
    first query stays, in the window of all that it is before.
    """
    if sinks < 0:
        raise ValueError(f"sinks {sinks}: allowed are integers >= 0")
    if sinks == 0:
        return positions
    far = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(query_positions >= 0, query_positions, far), axis=1)
    first = first.reshape(-1, *(1,) * (positions.ndim - 1))
    sink = (positions >= 0) & (positions < sinks) & (positions <= first)
    return jnp.where(sink, first, positions)
