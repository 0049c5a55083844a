"""The score of a query and a key: of all pairs, and of chosen ones."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

type Activation = Literal["identity", "relu"]
type Reduce = Literal["max", "sum"]


class Rule(NamedTuple):
    """What is done to the products of a query's heads with a key."""

    scale: float
    activation: Activation
    reduce: Reduce  # over heads


class Tensors(NamedTuple):
    """What scores are made of, and differentiable in."""

    queries: Float[Array, "B H T D"]
    keys: Float[Array, "B K S D"]
    weights: Float[Array, "B H T"] | None
    offsets: Float[Array, "B H T"] | None


def all_scores(rule: Rule, tensors: Tensors) -> Float[Array, "B T S"]:
    """reduce_h weight[s, h] act(scale q[s, h] k[t, h'] - offset[s, h]) of every pair, float32."""
    queries, keys, weights, offsets = tensors
    batch, heads, length, size = queries.shape
    # One axis for a KV head's rows: XLA's CPU matrix product is twice as slow with two.
    products = jnp.einsum(
        "bkrd,bksd->bkrs",
        queries.reshape(batch, keys.shape[1], -1, size),
        keys,
        preferred_element_type=jnp.float32,
    ).reshape(batch, heads, length, -1)
    column = tuple(None if array is None else array[..., None] for array in (weights, offsets))
    return _reduced(rule, products, *column)


def chosen_scores(rule: Rule, tensors: Tensors, chosen: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """The score of each key with its chosen query; 0, and no gradient, where that is negative."""
    there, index = (chosen >= 0)[:, None], jnp.maximum(chosen, 0)[:, None]
    queries, keys, *rest = tensors
    batch, heads, _, size = queries.shape

    def gathered(array: Float[Array, "B H T"] | None) -> Float[Array, "B H S"] | None:
        if array is None:
            return None
        return jnp.where(there, jnp.take_along_axis(array, index, axis=2), 0.0)

    # Masked before they are multiplied: what nobody sees may hold anything.
    asking = jnp.take_along_axis(queries.astype(jnp.float32), index[..., None], axis=2)
    asking = jnp.where(there[..., None], asking, 0.0)
    held = jnp.where(there[..., None], keys.astype(jnp.float32), 0.0)
    grouped = asking.reshape(batch, keys.shape[1], -1, keys.shape[2], size)
    products = jnp.sum(grouped * held[:, :, None], axis=-1).reshape(batch, heads, -1)
    return _reduced(rule, products, *map(gathered, rest))


def _reduced(rule: Rule, products: Array, weights: Array | None, offsets: Array | None) -> Array:
    scores = products * jnp.float32(rule.scale)
    if offsets is not None:
        scores = scores - offsets
    if rule.activation == "relu":
        scores = jax.nn.relu(scores)
    if weights is not None:
        scores = scores * weights
    return jnp.max(scores, axis=1) if rule.reduce == "max" else jnp.sum(scores, axis=1)
