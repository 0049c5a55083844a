"""Attention of packed rows in training, whose tokens may lie over the mesh axis `sequence`.

On such a mesh each device asks for its share of the tokens and gathers the keys and values of all
of them; the gradients of those are summed and scattered back. In blocks of plain JAX there: the
kernels know queries only that begin where the keys do.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float, Int

from kernels_pallas import retention_attention as operation
from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.retention_attention import blockwise
from kernels_pallas.retention_attention.segments import Tokens, tokens
from kvjax.models.decoder import Projected
from kvjax.sequence_parallel import divides, over_tokens


def retention_attention(
    new: Projected,
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: Int[Array, ""] | None,
    mesh: AbstractMesh | None,
) -> Float[Array, "B H T D"]:
    """Attention under decay, differentiable; see `kernels_pallas.retention_attention`."""
    if mesh is None or not divides(mesh):
        return operation.retention_attention(
            new.queries, new.keys, new.values, log_beta, segments, window=window
        )

    def attend(asking: Any, held: Any, whole: Any) -> Any:
        queries, *own = asking
        out = blockwise.retention_attention(queries, *held, *whole, asking=Tokens(*own))
        return (out,), None

    asking = (new.queries, *tokens(segments))
    held, whole = (new.keys, new.values, log_beta), (segments, _seen(window))
    return over_tokens(attend, asking, held, whole, mesh)[0][0]


def segment_attention(
    new: Projected,
    segments: Int[Array, "B T"],
    window: Int[Array, ""] | None,
    mesh: AbstractMesh | None,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """Plain attention within documents, forward only, and its log-sum-exp."""
    if mesh is None or not divides(mesh):
        return operation.segment_attention(
            new.queries, new.keys, new.values, segments, window=window
        )

    def attend(asking: Any, held: Any, whole: Any) -> Any:
        queries, *own = asking
        found = blockwise.segment_attention(queries, *held, *whole, asking=Tokens(*own))
        return found, None

    asking = (new.queries, *tokens(segments))
    return over_tokens(attend, asking, (new.keys, new.values), (segments, _seen(window)), mesh)[0]


def _seen(window: Int[Array, ""] | None) -> Int[Array, ""]:
    return jnp.int32(NO_WINDOW) if window is None else window
