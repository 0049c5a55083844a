"""Soft cache occupancy in blocks: memory linear in T and P, forward and backward."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.occupancy.sampled import sampled
from kernels_pallas.retention_attention.segments import Tokens, tokens, visible, visible_ranges


def occupancy(
    log_beta: Float[Array, "B N T"], segments: Int[Array, "B T"], *, block: int = 128
) -> Float[Array, "B N T"]:
    """As the reference, tiles above the diagonal and across documents skipped. Reverse mode only.

    Tokens have rates of their own, so no recurrence in t replaces the T^2 / 2 exponentials.
    """
    return _between(log_beta, tokens(segments), tokens(segments), block)


def occupancy_at(
    log_beta: Float[Array, "B N T"],
    segments: Int[Array, "B T"],
    at: Int[Array, "B P"],
    *,
    block: int = 128,
) -> Float[Array, "B N P"]:
    """As the reference; sorted samples skip the most tiles. Reverse mode only."""
    return _between(log_beta, sampled(segments, at), tokens(segments), block)


def _between(
    log_beta: Float[Array, "B N T"], asking: Tokens, held: Tokens, block: int
) -> Float[Array, "B N P"]:
    count = asking.positions.shape[1]
    query_block, key_block = min(block, count), min(block, log_beta.shape[2])
    # The lowest finite number for -inf, of which age 0 would make NaN.
    decay = jnp.maximum(log_beta, jnp.finfo(jnp.float32).min)
    with jax.named_scope("occupancy"):
        found = _sum(
            query_block,
            key_block,
            pad_to(decay, key_block, 2),
            asking.padded(query_block),
            held.padded(key_block),
        )
    return found[:, :, :count]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(
    query_block: int,
    key_block: int,
    log_beta: Float[Array, "B N T"],
    asking: Tokens,
    held: Tokens,
) -> Float[Array, "B N P"]:
    return _forward(query_block, key_block, log_beta, asking, held)[0]


def _retained(
    log_beta: Array, asking: Tokens, held: Tokens, at: Array, key_block: int
) -> tuple[Array, Array]:
    """Retentions [B, N, Q, S] of one tile, 0 where unseen, and ages [B, 1, Q, S]."""
    decay = lax.dynamic_slice_in_dim(log_beta, at, key_block, axis=2)
    part = held.part(at, key_block)
    seen = visible(asking, part)[:, None]
    age = (asking.positions[:, :, None] - part.positions[:, None, :]).astype(jnp.float32)[:, None]
    return jnp.exp(jnp.where(seen, age * decay[:, :, None], -jnp.inf)), age


def _forward(
    query_block: int, key_block: int, log_beta: Array, asking: Tokens, held: Tokens
) -> tuple[Float[Array, "B N P"], tuple[Array, Tokens, Tokens]]:
    batch, count = log_beta.shape[:2]
    first, last = visible_ranges(asking, held, query_block, key_block)

    def query_step(block: tuple[Tokens, Array, Array]) -> Array:
        asked, first, last = block

        def key_step(index: Array, total: Array) -> Array:
            retained, _ = _retained(log_beta, asked, held, index * key_block, key_block)
            return total + jnp.sum(retained, axis=3)

        zeros = jnp.zeros((batch, count, query_block), jnp.float32)
        return lax.fori_loop(first, last, key_step, zeros)

    found = lax.map(query_step, (asking.blocks(query_block), first, last))
    return jnp.moveaxis(found, 0, 2).reshape(batch, count, -1), (log_beta, asking, held)


def _backward(
    query_block: int,
    key_block: int,
    saved: tuple[Array, Tokens, Tokens],
    d_found: Float[Array, "B N P"],
) -> tuple[Array, None, None]:
    """d log_beta_i = sum over the t that see i of d S(t) (t - i) exp((t - i) log_beta_i)."""
    log_beta, asking, held = saved
    batch, count = log_beta.shape[:2]
    first, last = visible_ranges(asking, held, query_block, key_block)

    def query_step(total: Array, block: tuple[Tokens, Array, Array, Array]) -> tuple[Array, None]:
        asked, weight, first, last = block

        def key_step(index: Array, total: Array) -> Array:
            at = index * key_block
            retained, age = _retained(log_beta, asked, held, at, key_block)
            part = jnp.sum(weight[:, :, :, None] * age * retained, axis=2)
            old = lax.dynamic_slice_in_dim(total, at, key_block, axis=2)
            return lax.dynamic_update_slice_in_dim(total, old + part, at, axis=2)

        return lax.fori_loop(first, last, key_step, total), None

    weights = jnp.moveaxis(d_found.reshape(batch, count, -1, query_block), 2, 0)
    total, _ = lax.scan(
        query_step,
        jnp.zeros(log_beta.shape, jnp.float32),
        (asking.blocks(query_block), weights, first, last),
    )
    return total, None, None


_sum.defvjp(_forward, _backward)
