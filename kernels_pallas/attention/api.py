"""Dispatch of attention over positioned slots, and the merge of two of its parts."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import blockwise, library, reference
from kernels_pallas.attention.gradient import differentiable
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.dispatch import Operation

type Implementation = Literal["reference", "blockwise"]

_PACKAGE = "kernels_pallas.attention"
_PLAIN = {"reference": reference.attention, "blockwise": blockwise.attention}
_ATTENTION = Operation("attention", _PACKAGE, tuple(_PLAIN))
PROMPT = Operation(
    "causal_attention",
    _PACKAGE,
    (*_PLAIN, *library.KERNELS.values()),
    kernels=library.KERNELS,
)

# Up to this many logits per (row, head) one dense pass is faster than the loop over blocks.
_DENSE_LOGITS = 2**17


def attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """Attention over visible slots: output in the queries' dtype and float32 log-sum-exp.

    `implementation` None picks the dense reference for short queries, blocks otherwise.
    """
    found: tuple[Array, Array] = _ATTENTION(
        queries,
        keys,
        values,
        query_positions,
        key_positions,
        window,
        implementation=implementation,
        portable=portable_form(queries, keys),
    )
    return found


def portable_form(
    queries: Float[Array, "B H Q D"], keys: Float[Array, "B K S D"]
) -> Implementation:
    """Which of the plain forms `attention` takes."""
    dense = queries.shape[2] * keys.shape[2] <= _DENSE_LOGITS
    return "reference" if dense else "blockwise"


def causal_attention(
    queries: Float[Array, "B H T D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    positions: Int[Array, "B T"],
    *,
    implementation: Implementation | Literal["splash", "cudnn"] | None = None,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"]]:
    """A right-padded prompt's attention to itself, without a sliding window.

    Of a single token the output is its value and the log-sum-exp its one logit. Rows of padding
    (position -1) hold finite values of no meaning. `implementation` None takes the maintained
    kernel of the platform (splash on TPU, cuDNN on GPU) where it serves, and `attention`
    otherwise; a named one never falls back.
    """
    if implementation is None and queries.shape[2] == 1:
        return _one_token(queries, keys, values, positions)
    spread = jnp.broadcast_to(positions[:, None], keys.shape[:3])

    def run(chosen: str) -> tuple[Array, Array]:
        if chosen in _PLAIN:
            return _PLAIN[chosen](queries, keys, values, positions, spread)
        kernel = library.named(chosen)
        # The kernels' own gradients are those of the output alone, without the log-sum-exp.
        forward = differentiable(lambda q, k, v, *_: kernel(q, k, v))
        return forward(queries, keys, values, positions, spread, jnp.int32(NO_WINDOW))

    found: tuple[Array, Array] = PROMPT.choose(
        run, implementation=implementation, portable=portable_form(queries, keys)
    )
    return found


def _one_token(
    queries: Float[Array, "B H 1 D"],
    keys: Float[Array, "B K 1 D"],
    values: Float[Array, "B K 1 D"],
    positions: Int[Array, "B 1"],
) -> tuple[Float[Array, "B H 1 D"], Float[Array, "B H 1"]]:
    batch, heads, _, size = queries.shape
    shape = (batch, keys.shape[1], heads // keys.shape[1], size)
    products = queries.reshape(shape).astype(jnp.float32) * keys.astype(jnp.float32)
    logits = jnp.sum(products, axis=-1)
    logits = logits.reshape(batch, heads, 1) * jnp.float32(size**-0.5)
    out = jnp.broadcast_to(values, shape).reshape(queries.shape)
    return out.astype(queries.dtype), jnp.where(positions[:, None] >= 0, logits, -jnp.inf)


def merge(
    first: tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]],
    second: tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]],
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """Attention over the union of two disjoint sets of slots from attention over each.

    With log-sum-exps a and b: out = (e^a out_a + e^b out_b) / (e^a + e^b), in float32.
    """
    (out_a, lse_a), (out_b, lse_b) = first, second
    largest = jnp.maximum(jnp.maximum(lse_a, lse_b), -1e30)
    weight_a, weight_b = jnp.exp(lse_a - largest), jnp.exp(lse_b - largest)
    total = weight_a + weight_b
    share_a = (weight_a / jnp.maximum(total, 1e-30))[..., None]
    share_b = (weight_b / jnp.maximum(total, 1e-30))[..., None]
    out = out_a.astype(jnp.float32) * share_a + out_b.astype(jnp.float32) * share_b
    return out.astype(out_a.dtype), jnp.log(total) + largest
