"""Dispatch of attention under retention decay."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.dispatch import Operation

type RetentionImplementation = Literal["reference", "blockwise", "mosaic_tpu", "mosaic_gpu"]

_IMPLEMENTATIONS = ("reference", "blockwise", "mosaic_tpu", "mosaic_gpu")
_RETENTION = Operation(
    "retention_attention", "kernels_pallas.retention_attention", _IMPLEMENTATIONS
)
_SEGMENT = Operation("segment_attention", "kernels_pallas.retention_attention", _IMPLEMENTATIONS)

_DENSE_LENGTH = 128  # one block, and the longest row of which the reference is as fast


def retention_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    *,
    window: int | Int[Array, ""] | None = None,
    implementation: RetentionImplementation | None = None,
) -> Float[Array, "B H T D"]:
    """Causal attention in which key j counts beta_j^(i - j) at query i: the gates' training form.

    The decay is an additive float32 bias (i - j) log_beta_j on the scaled logits, so a token sees
    itself undecayed and log_beta 0 is plain attention. It is differentiable in reverse mode in
    the first four arguments.

    Args:
      queries, keys, values: after RoPE, of one dtype; query head h reads KV head h // (H / K).
      log_beta: float32 natural logarithm of the retention per token, at most 0; a KV head's
        query heads share it. -inf is read as the lowest finite number.
      segments: document of each token; tokens attend within theirs, and negative ones are padding,
        with output 0. Ages are differences of index, in a document the same as of its positions,
        so there are no positions to pass.
      window: sliding window in tokens, may be traced; None sees all earlier tokens.
      implementation: "reference" has all logits in memory, "blockwise" memory linear in T, and
        "mosaic_tpu" and "mosaic_gpu" are kernels. None takes the platform's kernel where it
        serves, or one of the first two by T. A named one never falls back.

    Raises:
      ValueError: an unknown implementation, heads that do not divide, or dtypes other than above.
      NotImplementedError: the named implementation does not serve these arguments.

    Source: TRIM-KV (arXiv 2512.03324), the retention-gated attention of training.
    """
    _check(queries, keys, values, segments)
    if log_beta.shape != keys.shape[:3]:
        raise ValueError(
            f"log_beta has shape {log_beta.shape}, but queries and keys ask for {keys.shape[:3]}"
        )
    if log_beta.dtype != jnp.float32:
        raise ValueError(
            f"log_beta is {log_beta.dtype}: compute it in float32, ages multiply its rounding"
        )
    return _RETENTION(
        queries,
        keys,
        values,
        log_beta,
        segments,
        NO_WINDOW if window is None else window,
        implementation=implementation,
        portable=_portable(queries.shape[2]),
    )


def segment_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    segments: Int[Array, "B T"],
    *,
    window: int | Int[Array, ""] | None = None,
    implementation: RetentionImplementation | None = None,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """Plain causal attention within documents, and its float32 log-sum-exp: a frozen model's.

    `retention_attention` with log_beta 0, but forward only. Padding gets 0 and -inf.
    """
    _check(queries, keys, values, segments)
    return _SEGMENT(
        queries,
        keys,
        values,
        segments,
        NO_WINDOW if window is None else window,
        implementation=implementation,
        portable=_portable(queries.shape[2]),
    )


def _portable(length: int) -> str:
    return "reference" if length <= _DENSE_LENGTH else "blockwise"


def _check(queries: Array, keys: Array, values: Array, segments: Array) -> None:
    batch, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    expected = {
        "keys": (keys.shape, (batch, kv_heads, length, size)),
        "values": (values.shape, (batch, kv_heads, length, size)),
        "segments": (segments.shape, (batch, length)),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(f"{name} has shape {given}, but queries and keys ask for {wanted}")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"queries are {queries.dtype}, keys {keys.dtype}, values {values.dtype}: cast them to "
            "one dtype"
        )
