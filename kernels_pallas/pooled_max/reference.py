"""Pooled maximum, every score in memory: the definition."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.pooled_max.pairs import Rule, Tensors, all_scores
from kernels_pallas.retention_attention.segments import Tokens, visible


def pooled_max(
    rule: Rule, tensors: Tensors, asking: Tokens, held: Tokens
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    """max over the queries that see a key of their score of it, and the first that reaches it.

    -inf and -1 for keys that nobody sees.
    """
    seen = visible(asking, held)
    scores = jnp.where(seen, all_scores(rule, tensors), -jnp.inf)
    largest = jnp.max(scores, axis=1)
    first = jnp.argmax(scores, axis=1).astype(jnp.int32)
    return largest, jnp.where(largest == -jnp.inf, -1, first)
