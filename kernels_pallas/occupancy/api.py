"""Dispatch of soft cache occupancy."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.dispatch import Operation

type Implementation = Literal["reference", "blockwise"]

_IMPLEMENTATIONS = ("reference", "blockwise")
_OCCUPANCY = Operation("occupancy", "kernels_pallas.occupancy", _IMPLEMENTATIONS)
_OCCUPANCY_AT = Operation("occupancy_at", "kernels_pallas.occupancy", _IMPLEMENTATIONS)

_DENSE_LENGTH = 128  # one block: the loop over blocks would skip nothing


def occupancy(
    log_beta: Float[Array, "B N T"],
    segments: Int[Array, "B T"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B N T"]:
    """S(t) = sum over i <= t in t's segment of beta_i^(t - i): the cache's soft size, in tokens.

    float32, differentiable in reverse mode in `log_beta`. Only non-positive numbers are
    exponentiated.

    Args:
      log_beta: float32 natural logarithm of the retention per token, at most 0; N counts KV heads,
        or layers times KV heads. -inf is read as the lowest finite number.
      segments: document of each token; negative ones are padding, with occupancy 0.
      implementation: "reference" has all pairs in memory, "blockwise" memory linear in T, None
        chooses by T. A named one never falls back.

    Raises:
      ValueError: an unknown implementation, shapes that do not fit, or log_beta not in float32.

    Source: the capacity losses of TRIM-KV (arXiv 2512.03324) and of "Make Each Token Count"
    (arXiv 2605.09649), which take S(t) over the budget.
    """
    _check(log_beta, segments)
    dense = segments.shape[1] <= _DENSE_LENGTH
    portable = "reference" if dense else "blockwise"
    return _OCCUPANCY(log_beta, segments, implementation=implementation, portable=portable)


def occupancy_at(
    log_beta: Float[Array, "B N T"],
    segments: Int[Array, "B T"],
    at: Int[Array, "B P"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B N P"]:
    """`occupancy` at the indices `at` only, for T P instead of T^2 / 2 exponentials per head.

    Indices are below T, in any order and with repeats; ascending ones let the most blocks be
    skipped. Where one is negative or at padding the result is 0. For the rest see `occupancy`.
    """
    _check(log_beta, segments)
    if at.shape[0] != segments.shape[0]:
        raise ValueError(f"at has {at.shape[0]} rows, segments {segments.shape[0]}: give both one")
    dense = segments.shape[1] <= _DENSE_LENGTH and at.shape[1] <= _DENSE_LENGTH
    portable = "reference" if dense else "blockwise"
    return _OCCUPANCY_AT(log_beta, segments, at, implementation=implementation, portable=portable)


def _check(log_beta: Array, segments: Array) -> None:
    if segments.shape != (log_beta.shape[0], log_beta.shape[2]):
        raise ValueError(
            f"segments have shape {segments.shape}, but log_beta {log_beta.shape} asks for "
            f"{(log_beta.shape[0], log_beta.shape[2])}"
        )
    if log_beta.dtype != jnp.float32:
        raise ValueError(
            f"log_beta is {log_beta.dtype}: compute it in float32, ages multiply its rounding"
        )
