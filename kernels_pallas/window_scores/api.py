"""Attention of a few queries to all slots, for scorers that let queries vote; dispatch."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas.dispatch import Operation
from kernels_pallas.window_scores.reference import (
    OverGroup,
    OverQueries,
    window_attention_reference,
)

_PACKAGE = "kernels_pallas.window_scores"
_SCORES = Operation("window_scores", _PACKAGE, ("reference", "mosaic_tpu", "mosaic_gpu"))
_MOMENTS = Operation("window_moments", _PACKAGE, ("reference", "mosaic_tpu", "mosaic_gpu"))


def window_attention(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    *,
    window: int | Int[Array, ""] | None = None,
    implementation: Literal["reference"] | None = None,
) -> Float[Array, "B H W S"]:
    """float32 attention weights of each query over the slots it may see, all in memory.

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
    _check(queries, keys, query_positions, positions)
    with jax.named_scope("window_attention"):
        return window_attention_reference(queries, keys, query_positions, positions, window=window)


def window_scores(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    query_weights: Float[Array, "B W"] | None = None,
    *,
    over_queries: OverQueries = "mean",
    over_group: OverGroup = "mean",
    window: int | Int[Array, ""] | None = None,
    implementation: Literal["reference", "mosaic_tpu", "mosaic_gpu"] | None = None,
) -> Float[Array, "B N S"]:
    """`window_attention` reduced over queries and query group, which kernels never store.

    Args:
      queries, keys, query_positions, positions, window: as in `window_attention`.
      query_weights: what each query's attention is multiplied with, such as the weights of a
        moving average; only with over_queries "sum".
      over_queries: "mean" over the queries that are there, "sum" or "max".
      over_group: how the query heads of a KV head are reduced; None keeps all query heads.
      implementation: None takes the platform's kernel, and where there is none, or it does not
        serve, the reference.

    Returns:
      float32 scores, N = K, or with over_group None N = H. Kernels have no gradient.

    Raises:
      ValueError: shapes or reductions do not fit together, or an unknown implementation.
      NotImplementedError: the named implementation does not serve these arguments.
    """
    _check(queries, keys, query_positions, positions)
    if over_queries not in ("mean", "sum", "max"):
        raise ValueError(f"over_queries={over_queries!r}: allowed are 'mean', 'sum' and 'max'")
    if over_group not in ("mean", "sum", "max", None):
        raise ValueError(f"over_group={over_group!r}: allowed are 'mean', 'sum', 'max' and None")
    if query_weights is not None:
        if over_queries != "sum":
            raise ValueError(
                f"query_weights with over_queries={over_queries!r}: allowed with 'sum' only"
            )
        if query_weights.shape != query_positions.shape:
            raise ValueError(
                f"query_weights has shape {query_weights.shape}, but the queries ask for "
                f"{query_positions.shape}"
            )
    with jax.named_scope("window_scores"):
        scores: Array = _SCORES(
            queries,
            keys,
            query_positions,
            positions,
            query_weights,
            over_queries=over_queries,
            over_group=over_group,
            window=window,
            implementation=implementation,
            portable="reference",
        )
    return scores


def window_moments(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    *,
    window: int | Int[Array, ""] | None = None,
    implementation: Literal["reference", "mosaic_tpu", "mosaic_gpu"] | None = None,
) -> tuple[Float[Array, "B H S"], Float[Array, "B H S"], Float[Array, "B H S"]]:
    """Mean, unbiased variance and -sum a log a of `window_attention` over the window's queries.

    Arguments and errors as of `window_scores`. Absent queries do not count; a single query has
    variance 0.
    """
    _check(queries, keys, query_positions, positions)
    with jax.named_scope("window_moments"):
        moments: tuple[Array, Array, Array] = _MOMENTS(
            queries,
            keys,
            query_positions,
            positions,
            window=window,
            implementation=implementation,
            portable="reference",
        )
    return moments


def _check(queries: Array, keys: Array, query_positions: Array, positions: Array) -> None:
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
