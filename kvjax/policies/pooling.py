"""Smoothing of scores over neighbouring slots."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def check_pooling(kernel: int, kind: str = "max") -> None:
    """Raises ValueError for a kernel that is not an odd positive integer, or an unknown kind."""
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel={kernel}: allowed are odd integers >= 1")
    if kind not in ("avg", "max"):
        raise ValueError(f"pooling={kind!r}: allowed are 'avg' and 'max'")


def pool(
    scores: Float[Array, "*n S"],
    kernel: int,
    kind: Literal["avg", "max"] = "avg",
    valid: Bool[Array, "*n S"] | None = None,
) -> Float[Array, "*n S"]:
    """Pools a centred window of `kernel` slots with stride 1.

    "avg" adds the entries of the window and always divides by `kernel`: what lies beyond the
    ends, and an invalid slot inside, counts as a zero (PyTorch's avg_pool1d with padding
    kernel // 2 and count_include_pad). "max" ignores both. Without `valid`, every slot counts
    with the score it holds.

    Raises:
      ValueError: a kernel that is not an odd positive integer, or an unknown kind.
    """
    check_pooling(kernel, kind)
    absent = 0.0 if kind == "avg" else -jnp.inf
    if valid is not None:
        scores = jnp.where(valid, scores, absent)
    sides = (0,) * (scores.ndim - 1)
    pooled = jax.lax.reduce_window(
        scores,
        absent,
        jax.lax.add if kind == "avg" else jax.lax.max,
        window_dimensions=(*(1 for _ in sides), kernel),
        window_strides=(1,) * scores.ndim,
        padding=(*((0, 0) for _ in sides), (kernel // 2, kernel // 2)),
    )
    return pooled / kernel if kind == "avg" else pooled
