"""How much an attention output changes, after W_O, when one entry is removed."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def output_factor(
    output_projection: Float[Array, "H D E"],
    num_kv_heads: int,
    granularity: Literal["kv", "query"] = "kv",
) -> Float[Array, "N M R"]:
    """A factor F with ||x F||_2 = ||x W||_2 for every x, and R <= M columns instead of E.

    W is the stack [G D, E] of a group's slices of W_O ("kv", N = K, M = G D) or one head's slice
    ("query", N = H, M = D). F = R^T of the QR decomposition of W^T, lower triangular. The QR
    loses digits with the condition number of W; a Cholesky factor of the Gram matrix W W^T, with
    its square, and it fails where M > E. For the weights of a layer this can be computed once.
    """
    blocks = num_kv_heads if granularity == "kv" else output_projection.shape[0]
    model = output_projection.shape[-1]
    stacked = output_projection.astype(jnp.float32).reshape(blocks, -1, model)
    return jnp.swapaxes(jnp.linalg.qr(jnp.swapaxes(stacked, 1, 2), mode="r"), 1, 2)


def value_norms(
    values: Float[Array, "B K S D"], valid: Bool[Array, "B K S"]
) -> Float[Array, "B K S"]:
    """||v_j||_2 in float32, 0 in empty slots."""
    squares = jnp.sum(jnp.square(values.astype(jnp.float32)), axis=-1)
    return jnp.where(valid, jnp.sqrt(squares), 0.0)
