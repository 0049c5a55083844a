"""Dispatch of removal errors, and ReST-KV's score from queries, keys and values."""

from __future__ import annotations

from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas.dispatch import Operation
from kernels_pallas.window_scores import window_scores

_OPERATION = Operation(
    "removal_error",
    "kernels_pallas.removal_error",
    ("reference", "blockwise", "mosaic_tpu", "mosaic_gpu"),
)


def removal_error(
    weights: Float[Array, "B K G S"],
    values: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    summed_before: Int[Array, " B"],
    factor: Float[Array, "N M R"] | None,
    *,
    joint: bool,
    tau: float = 1.0,
    implementation: Literal["reference", "blockwise", "mosaic_tpu", "mosaic_gpu"] | None = None,
) -> Float[Array, "B N S"]:
    """What each query head's output, or jointly a query group's, loses with each entry.

    || sum_h a_h[j] / (1 - a_h[j]) (o_h - v_j) F_h ||_2, where o_h sums a_h[j] v_j over the entries
    at positions below `summed_before`. Source: ReST-KV (arXiv 2605.08840), CAOTE (2504.14051).

    Args:
      weights: attention a, 0 in empty slots.
      values: of any float type; those of empty slots do not matter.
      positions: absolute, -1 where the slot is empty.
      summed_before: per row, where the entries that make up the output end.
      factor: F with ||x F|| = ||x W_O||: of a query group (`joint`; N = K, M = G D, lower
        triangular), or of each query head (N = H, M = D). None is the identity.
      joint: adds up over the query group before the norm.
      tau: exponent of the norm.
      implementation: None takes the platform's kernel, and where there is none the blocks.

    Raises:
      ValueError: the factor does not fit, or an unknown implementation.
      NotImplementedError: the named implementation does not serve these arguments.
    """
    _, kv_heads, groups, _ = weights.shape
    if factor is not None:
        size = values.shape[3]
        wanted = (kv_heads, groups * size) if joint else (kv_heads * groups, size)
        if factor.shape[:2] != wanted or factor.shape[2] > wanted[1]:
            raise ValueError(
                f"factor has shape {factor.shape}: allowed with joint={joint} are {wanted} and at "
                f"most {wanted[1]} columns"
            )
    with jax.named_scope("removal_error"):
        error: Array = _OPERATION(
            weights,
            values,
            positions,
            summed_before,
            factor,
            joint=joint,
            tau=tau,
            implementation=implementation,
            portable="blockwise",
        )
    return error


def restkv_scores(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    query_weights: Float[Array, "B W"],
    summed_before: Int[Array, " B"],
    factor: Float[Array, "N M R"] | None,
    *,
    joint: bool,
    tau: float = 1.0,
    window: int | Int[Array, ""] | None = None,
) -> Float[Array, "B N S"]:
    """`removal_error` of the window's attention, averaged over its queries by `query_weights`.

    Only [B, H, S] passes between the two: 4 G bytes per slot and KV head written and read twice,
    next to a read of K and one of V. Arguments as of `window_scores` and `removal_error`; each
    part takes its platform's kernel.
    """
    weights = window_scores(
        queries,
        keys,
        query_positions,
        positions,
        query_weights,
        over_queries="sum",
        over_group=None,
        window=window,
    )
    grouped = weights.reshape(*keys.shape[:2], -1, keys.shape[2])
    return removal_error(grouped, values, positions, summed_before, factor, joint=joint, tau=tau)
