"""Dispatch of column attention."""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.column_attention.reference import Statistic
from kernels_pallas.dispatch import Operation

_OPERATION = Operation(
    "column_attention", "kernels_pallas.column_attention", ("reference", "blockwise", "mosaic_gpu")
)

# Up to this many logits per (row, head) one dense pass is faster than the loop over blocks.
_DENSE_LOGITS = 2**17


def column_attention(
    queries: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    statistic: Statistic = "sum",
    implementation: Literal["reference", "blockwise", "mosaic_gpu"] | None = None,
) -> Float[Array, "B H S"]:
    """A statistic, over queries, of their softmax weights on each slot, given their log-sum-exp.

    Args:
      queries, keys: after RoPE; query head h reads KV head h // (H / K).
      lse: log-sum-exp of each query's scaled logits over everything that it attended to, which
        may be more than these keys; queries with -inf contribute nothing.
      query_positions, key_positions: absolute, -1 for padding and empty slots.
      window: sliding window of the layer, in tokens.
      statistic: "sum" (H2O's), "max" (KVzip's), and over the queries that see a slot "mean" and
        the unbiased "variance", 0 where a single one does.
      implementation: None takes the platform's kernel, and where there is none, or it does not
        serve, one dense pass for few logits and blocks otherwise.

    Raises:
      ValueError: an unknown statistic or implementation.
    """
    if statistic not in get_args(Statistic.__value__):
        allowed = ", ".join(map(repr, get_args(Statistic.__value__)))
        raise ValueError(f"statistic={statistic!r}: allowed are {allowed}")
    dense = queries.shape[2] * keys.shape[2] <= _DENSE_LOGITS
    column: Array = _OPERATION(
        queries,
        lse,
        keys,
        query_positions,
        key_positions,
        window,
        statistic=statistic,
        implementation=implementation,
        portable="reference" if dense else "blockwise",
    )
    return column
