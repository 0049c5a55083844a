"""Dispatch of the pooled maximum, and its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.dispatch import Operation
from kernels_pallas.pooled_max.pairs import Activation, Reduce, Rule, Tensors, chosen_scores
from kernels_pallas.retention_attention.segments import Tokens

# Not a `type` statement: beartype takes aliases of one name, of whatever module, for one type.
Implementation = Literal["reference", "blockwise", "mosaic_tpu", "mosaic_gpu"]

_OPERATION = Operation(
    "pooled_max",
    "kernels_pallas.pooled_max",
    ("reference", "blockwise", "mosaic_tpu", "mosaic_gpu"),
)

_DENSE_SCORES = 2**17  # per (row, head): up to here one dense pass is as fast


def pooled_max(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K S D"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    *,
    weights: Float[Array, "B H T"] | None = None,
    offsets: Float[Array, "B H T"] | None = None,
    query_segments: Int[Array, "B T"] | None = None,
    key_segments: Int[Array, "B S"] | None = None,
    scale: float = 1.0,
    activation: Activation = "identity",
    reduce: Reduce = "sum",
    near: int = 0,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    """For each key, the largest score that a query gives it, and the index of that query.

        score(s, t) = reduce_h weights[h, s] act(scale q[h, s] k[h', t] - offsets[h, s])

    with h' = h // (H / K), in float32. Query s sees key t where t's position is at most s's less
    `near`, and both lie in one segment. Keys that no query sees get -inf and -1; of several
    queries that reach the maximum it is the first. Differentiable in reverse mode in queries,
    keys, weights and offsets: the gradient goes through the pairs (query of the maximum, key)
    only, a subgradient that is exact where the maximum is unique, and takes memory linear in S.

    Args:
      queries, keys: of one dtype; one KV head serves all query heads of an indexer.
      query_positions, key_positions: -1 for padding and empty slots.
      weights, offsets: float32 per query and head; None is 1 and 0.
      query_segments, key_segments: documents, negative ones are padding; None is one document.
      scale, activation, reduce: as in the formula; reduce is the "max" or the "sum" over heads.
      near: distance below which pairs are left out; 0 counts a token's own pair.
      implementation: "reference" has all scores in memory, "blockwise" memory linear in T and S,
        as have the Pallas kernels "mosaic_tpu" and "mosaic_gpu". None is the platform's kernel;
        where there is none, or it declines, one of the first two by T S. A named one never falls
        back.

    Raises:
      ValueError: an unknown option, heads that do not divide, or arrays that do not fit.
      NotImplementedError: the implementation that was asked for does not serve these arrays.

    Source: IndexMem (arXiv 2605.25475), its token importance and its streaming KL.
    """
    _check(queries, keys, weights, offsets, query_segments, key_segments, near)
    for name, value, allowed in (
        ("activation", activation, ("identity", "relu")),
        ("reduce", reduce, ("max", "sum")),
        ("implementation", implementation, (*_OPERATION.implementations, None)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
    dense = queries.shape[2] * keys.shape[2] <= _DENSE_SCORES
    # Seen from `near` tokens before them, queries see exactly the keys that are far enough.
    far = jnp.where(query_positions >= near, query_positions - near, -1)
    return _pooled(
        Rule(float(scale), activation, reduce),
        implementation,
        "reference" if dense else "blockwise",
        Tensors(queries, keys, weights, offsets),
        _tokens(far, query_segments),
        _tokens(key_positions, key_segments),
    )


def _tokens(positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None) -> Tokens:
    if segments is None:
        segments = jnp.zeros_like(positions)
    there = (positions >= 0) & (segments >= 0)
    return Tokens(*(jnp.where(there, a, -1).astype(jnp.int32) for a in (positions, segments)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _pooled(
    rule: Rule,
    implementation: Implementation | None,
    portable: Implementation,
    tensors: Tensors,
    asking: Tokens,
    held: Tokens,
) -> tuple[Float[Array, "B S"], Int[Array, "B S"]]:
    return _OPERATION(rule, tensors, asking, held, implementation=implementation, portable=portable)


def _forward(
    rule: Rule,
    implementation: Implementation | None,
    portable: Implementation,
    tensors: Tensors,
    asking: Tokens,
    held: Tokens,
) -> tuple[tuple[Array, Array], tuple[Tensors, Array]]:
    largest, query = _pooled(rule, implementation, portable, tensors, asking, held)
    return (largest, query), (tensors, query)


def _backward(
    rule: Rule,
    implementation: Implementation | None,
    portable: Implementation,
    saved: tuple[Tensors, Array],
    gradients: tuple[Float[Array, "B S"], Any],  # integers have none
) -> tuple[Tensors, None, None]:
    del implementation, portable
    tensors, query = saved
    _, pull = jax.vjp(lambda t: chosen_scores(rule, t, query), tensors)
    (found,) = pull(jnp.where(query >= 0, gradients[0], 0.0))
    return found, None, None


_pooled.defvjp(_forward, _backward)


def _check(
    queries: Array,
    keys: Array,
    weights: Array | None,
    offsets: Array | None,
    query_segments: Array | None,
    key_segments: Array | None,
    near: int,
) -> None:
    if queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"{queries.shape[1]} query heads cannot share {keys.shape[1]} KV heads evenly"
        )
    if queries.dtype != keys.dtype:
        raise ValueError(f"queries are {queries.dtype}, keys {keys.dtype}: cast them to one dtype")
    for name, array in (("weights", weights), ("offsets", offsets)):
        if array is not None and array.dtype != jnp.float32:
            raise ValueError(f"{name} are {array.dtype}: compute them in float32")
    if (query_segments is None) != (key_segments is None):
        raise ValueError("segments of queries without those of keys, or the other way: give both")
    if near < 0:
        raise ValueError(f"near={near}: allowed are integers >= 0")
