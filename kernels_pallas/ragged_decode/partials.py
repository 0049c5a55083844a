"""Softmax in parts: attention over all entries from attention over each part of them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    outs: Float[Array, "N C R D"], lses: Float[Array, "N C R"]
) -> tuple[Float[Array, "N R D"], Float[Array, "N R"]]:
    """sum over chunks of e^lse_c out_c / sum over chunks of e^lse_c, and the log of that sum.

    A chunk of log-sum-exp -inf may hold anything; rows with no other get 0 and -inf.
    """
    if outs.shape[1] == 1:
        out, lse = outs[:, 0], lses[:, 0]
        return jnp.where((lse > -jnp.inf)[..., None], out, 0.0), lse
    largest = jnp.maximum(jnp.max(lses, axis=1, keepdims=True), -1e30)
    weights = jnp.exp(lses - largest)
    total = jnp.sum(weights, axis=1)
    share = (weights / jnp.maximum(total, 1e-30)[:, None])[..., None]
    out = jnp.sum(jnp.where(share > 0, share * outs, 0.0), axis=1)
    return out, jnp.log(total) + largest[:, 0]


def total(first: Float[Array, "*n"], second: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The log-sum-exp of two parts together, as `attention.merge` has it."""
    largest = jnp.maximum(jnp.maximum(first, second), -1e30)
    return jnp.log(jnp.exp(first - largest) + jnp.exp(second - largest)) + largest


def mass(logits: Float[Array, "B H Q S"], total: Float[Array, "B H Q"]) -> Float[Array, "B H S"]:
    """Softmax weights summed over the queries, from logits and the log-sum-exp over everything."""
    return jnp.sum(jnp.exp(logits - jnp.maximum(total, -1e30)[..., None]), axis=2)
