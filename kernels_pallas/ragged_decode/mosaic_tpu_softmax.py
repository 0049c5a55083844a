"""A softmax in progress in VMEM: rows of queries against one block of slots after the other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels_pallas.ragged_decode.mosaic_tpu_layout import LANES


def scratch(tile: int, size: int) -> list[Any]:
    """Scratch of a softmax in progress: output, largest logit, sum of weights."""
    column = pltpu.VMEM((tile, LANES), jnp.float32)
    return [pltpu.VMEM((tile, size), jnp.float32), column, column]


def begin(state: Any) -> None:
    out, largest, total = state
    out[...] = jnp.zeros_like(out)
    largest[...] = jnp.full_like(largest, -1e30)
    total[...] = jnp.zeros_like(total)


def logits(queries: Array, keys: Array, slots: Array, ranges: Array, filled: Array) -> Array:
    """Logits [R, block], -inf for what a row does not see and from slot `filled` on."""
    products = _product(queries, keys, ((1,), (1,))) * queries.shape[-1] ** -0.5
    place = lax.broadcasted_iota(jnp.int32, products.shape, 1)
    seen = (slots <= ranges[:, 0:1]) & (slots > ranges[:, 1:2]) & (place < filled)
    return jnp.where(seen, products, -jnp.inf)


def add(state: Any, scores: Array, values: Array) -> None:
    out, largest, total = state
    before = largest[:, 0:1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights, shrink = jnp.exp(scores - now), jnp.exp(before - now)
    added = _product(weights.astype(values.dtype), values, ((1,), (0,)))
    out[...] = out[...] * shrink + added
    largest[...] = jnp.broadcast_to(now, largest.shape)
    sums = total[:, 0:1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    total[...] = jnp.broadcast_to(sums, total.shape)


def finish(state: Any, out_ref: Any, lse_ref: Any) -> None:
    out, largest, total = state
    sums = total[:, 0:1]
    out_ref[0, 0] = (out[...] / jnp.maximum(sums, 1e-30)).astype(out_ref.dtype)
    lse = largest[:, 0:1] + jnp.log(jnp.maximum(sums, 1e-30))
    lse_ref[0, 0] = jnp.where(sums > 0, lse, -jnp.inf)


def _product(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
