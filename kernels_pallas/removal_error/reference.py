"""The change of an attention output by the removal of one entry, all of it in memory."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.window_scores import reference as window_scores


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
    """|| sum_h a_h[j] / (1 - a_h[j]) (o_h - v_j) F_h ||_2, or each query head's own term.

    o_h = sum of a_h[j] v_j over the entries at positions below `summed_before`, not
    renormalised; 1 - a is at least 1e-6. `joint` adds up over the query group before the norm
    (N = K, M = G D); otherwise N = H, M = D. Without a factor F_h is the identity on D channels of
    the head's own. With tau the norm, in `joint` divided by the group's summed odds, is raised
    to it.
    """
    batch, kv_heads, groups, slots = weights.shape
    valid = positions >= 0
    summed = valid & (positions < summed_before[:, None, None])
    values = jnp.where(valid[..., None], values.astype(jnp.float32), 0.0)
    own = jnp.where(summed[:, :, None], weights, 0.0)
    outputs = jnp.einsum("bkgs,bksd->bkgd", own, values, precision="highest")
    odds = weights / jnp.maximum(1.0 - weights, 1e-6)
    change = outputs[:, :, :, None] - values[:, :, None]
    if joint:
        change = change * odds[..., None]
        change = jnp.swapaxes(change, 2, 3).reshape(batch, kv_heads, slots, -1)
        if factor is not None:
            change = jnp.einsum("bksm,kmr->bksr", change, factor, precision="highest")
        norm = jnp.sqrt(jnp.sum(jnp.square(change), axis=-1))
        scale = jnp.sum(odds, axis=2)
        return norm if tau == 1 else scale * (norm / jnp.where(scale > 0, scale, 1.0)) ** tau
    if factor is not None:
        own_factor = factor.reshape(kv_heads, groups, *factor.shape[1:])
        change = jnp.einsum("bkgsd,kgdr->bkgsr", change, own_factor, precision="highest")
    norm = jnp.sqrt(jnp.sum(jnp.square(change), axis=-1))
    return (odds * norm**tau).reshape(batch, kv_heads * groups, slots)


def restkv_scores(
    queries: Float[Array, "B H W D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B W"],
    positions: Int[Array, "B K S"],
    query_weights: Float[Array, "B W"],
    summed_before: Int[Array, " B"],
    factor: Float[Array, "N M R"] | None,
    *,
    joint: bool,
    tau: float = 1.0,
    window: int | Int[Array, ""] | None = None,
) -> Float[Array, "B N S"]:
    """`removal_error` of the queries' weighted attention."""
    weights = window_scores.window_scores(
        queries,
        keys,
        query_positions,
        positions,
        query_weights,
        over_queries="sum",
        over_group=None,
        window=window,
    )
    grouped = weights.reshape(*keys.shape[:2], -1, keys.shape[2])
    return removal_error(grouped, values, positions, summed_before, factor, joint=joint, tau=tau)
