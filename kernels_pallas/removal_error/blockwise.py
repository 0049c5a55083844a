"""Removal errors some slots at a time, so that memory does not follow S x G x D."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_BLOCK = 512  # slots at a time: temporaries stay in cache


def removal_error(
    weights: Float[Array, "B K G S"],
    values: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    summed_before: Int[Array, " B"],
    factor: Float[Array, "N M R"] | None,
    *,
    joint: bool,
    tau: float = 1.0,
) -> Float[Array, "B N S"]:
    """As the reference. A joint factor has to be lower triangular, as `output_factor` makes it."""
    valid = positions >= 0
    summed = valid & (positions < summed_before[:, None, None])
    outputs = attention_output(jnp.where(summed[:, :, None], weights, 0.0), values, valid)
    return error_of(odds(weights), outputs, values, valid, factor, joint=joint, tau=tau)


def odds(weights: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """a / (1 - a), with 1 - a at least 1e-6: a weight of 1 stays finite."""
    return weights / jnp.maximum(1.0 - weights, 1e-6)


def attention_output(
    weights: Float[Array, "B K G S"],
    values: Float[Array, "B K S D"],
    valid: Bool[Array, "B K S"],
) -> Float[Array, "B K G D"]:
    """sum_j a_j v_j over the valid slots."""
    clean = jnp.where(valid[..., None], values.astype(jnp.float32), 0.0)
    return jnp.matmul(weights, clean, precision="highest")


def by_slot_blocks(
    part: Callable[[Array, int], Array], slots: int, like: Float[Array, "*n S"]
) -> Float[Array, "*n S"]:
    """An array shaped `like`, filled by `part(start, size)` -> [*n, size] block after block."""
    size = min(_BLOCK, slots)
    if size == slots:
        return part(jnp.int32(0), size)

    def write(step: Array, into: Array) -> Array:
        # The last block starts early enough to be full, and repeats some slots.
        start = jnp.minimum(step * size, slots - size)
        return lax.dynamic_update_slice_in_dim(into, part(start, size), start, axis=-1)

    return lax.fori_loop(0, -(-slots // size), write, jnp.zeros_like(like))


def clean_values(
    values: Float[Array, "B K S D"], valid: Bool[Array, "B K S"], start: Array, size: int
) -> Float[Array, "B K size D"]:
    """A block of values in float32, 0 in empty slots: these may hold NaN, and 0 x NaN is NaN."""
    block = lax.dynamic_slice_in_dim(values, start, size, axis=2).astype(jnp.float32)
    held = lax.dynamic_slice_in_dim(valid, start, size, axis=2)
    return jnp.where(held[..., None], block, 0.0)


def error_of(
    share: Float[Array, "B K G S"],
    outputs: Float[Array, "B K G D"],
    values: Float[Array, "B K S D"],
    valid: Bool[Array, "B K S"],
    factor: Float[Array, "N M R"] | None,
    *,
    joint: bool,
    tau: float = 1.0,
) -> Float[Array, "B N S"]:
    """|| sum over heads of share_h[j] (o_h - v_j) W_h ||_2, or each head's own term.

    `joint` sums over the query group before the norm (N = K); otherwise N = H. Without a factor
    W_h is the identity on its own D channels. Values are subtracted before projecting: the
    expanded square would cancel where v_j is close to o_h.
    """
    batch, kv_heads, groups, slots = share.shape
    error = _joint_error if joint else _separate_error

    def part(start: Array, size: int) -> Array:
        block = clean_values(values, valid, start, size)
        own_share = lax.dynamic_slice_in_dim(share, start, size, axis=3)
        return error(own_share, outputs, block, factor, tau)

    heads = kv_heads if joint else kv_heads * groups
    return by_slot_blocks(part, slots, jnp.zeros((batch, heads, slots), jnp.float32))


def _joint_error(
    share: Array, outputs: Array, values: Array, factor: Array | None, tau: float
) -> Float[Array, "B K S"]:
    groups, head_dim = share.shape[2], values.shape[-1]
    change = [share[:, :, g, :, None] * (outputs[:, :, g, None] - values) for g in range(groups)]
    stacked = jnp.concatenate(change, axis=-1)  # [B, K, S, G D]
    if factor is None:
        total = jnp.sum(jnp.square(stacked), axis=-1)
    else:
        # The factor is lower triangular: block column c of it reads rows from c on only.
        total = jnp.zeros(stacked.shape[:-1], jnp.float32)
        for start in range(0, factor.shape[-1], head_dim):
            block = factor[None, :, start:, start : start + head_dim]
            projected = jnp.matmul(stacked[..., start:], block, precision="highest")
            total = total + jnp.sum(jnp.square(projected), axis=-1)
    norm = jnp.sqrt(total)
    if tau == 1:
        return norm
    scale = jnp.sum(share, axis=2)
    return scale * (norm / jnp.where(scale > 0, scale, 1.0)) ** tau


def _separate_error(
    share: Array, outputs: Array, values: Array, factor: Array | None, tau: float
) -> Float[Array, "B H S"]:
    batch, kv_heads, groups, slots = share.shape
    norms = []
    for group in range(groups):
        change = outputs[:, :, group, None] - values
        if factor is not None:
            own = factor.reshape(kv_heads, groups, *factor.shape[1:])[None, :, group]
            change = jnp.matmul(change, own, precision="highest")
        norms.append(jnp.sqrt(jnp.sum(jnp.square(change), axis=-1)))
    norm = jnp.stack(norms, axis=2)
    score = share * (norm if tau == 1 else norm**tau)
    return score.reshape(batch, kv_heads * groups, slots)
