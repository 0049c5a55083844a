"""Attention weights of a few queries over all slots, for scorers that let queries vote."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas.window_scores.reference import window_attention_reference


def window_attention(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    *,
    window: int | Int[Array, ""] | None = None,
    implementation: Literal["reference"] | None = None,
) -> Float[Array, "B H W S"]:
    """float32 attention weights of each query over the slots it may see.

    Args:
      queries, keys: after RoPE; query head h reads KV head h // (H / K).
      query_positions: absolute, -1 where there is no query.
      positions: absolute, -1 where the slot is empty.
      window: sliding window of the layer, in tokens; None sees all earlier tokens.
      implementation: None chooses; there is one, "reference".

    Returns:
      Weights that sum to 1 over the slots; rows of absent queries, and of queries that see
      nothing, are exactly 0.

    Raises:
      ValueError: shapes do not fit together, or an unknown implementation.
    """
    if implementation not in (None, "reference"):
        raise ValueError(f"implementation={implementation!r}: allowed are 'reference' and None")
    batch, heads, count, head_dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    expected = {
        "keys": (keys.shape, (batch, kv_heads, slots, head_dim)),
        "query_positions": (query_positions.shape, (batch, count)),
        "positions": (positions.shape, (batch, kv_heads, slots)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(f"{name} has shape {given}, but queries and keys ask for {wanted}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    with jax.named_scope("window_attention"):
        return window_attention_reference(queries, keys, query_positions, positions, window=window)
