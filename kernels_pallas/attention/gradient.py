"""Gradients of attention in blocks, whoever computed it: memory linear in Q and S."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import block_bounds, pad_to, visible_range
from kernels_pallas.attention.mask import visible

type Found = tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]


def differentiable(forward: Callable[..., Found]) -> Callable[..., Found]:
    """Gives a function its gradient, made from its output and log-sum-exp.

    It takes what `attention` does, the window as an array, all by position.
    """
    function = jax.custom_vjp(forward)

    def kept(*arguments: Array) -> tuple[Found, tuple[tuple[Array, ...], Found]]:
        found = forward(*arguments)
        return found, (arguments, found)

    function.defvjp(kept, _backward)
    return function


def _backward(
    kept: tuple[tuple[Array, ...], Found], cotangents: Found
) -> tuple[Array, Array, Array, None, None, None]:
    (queries, keys, values, asked, places, window), (out, lse) = kept
    into = backward(queries, keys, values, asked, places, window, out, lse, *cotangents)
    return (*into, None, None, None)


def backward(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    window: Int[Array, ""],
    out: Float[Array, "B H Q D"],
    lse: Float[Array, "B H Q"],
    out_cotangent: Float[Array, "B H Q D"],
    lse_cotangent: Float[Array, "B H Q"],
    *,
    query_block: int = 256,
    key_block: int = 256,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """Cotangents of queries, keys and values; weights are computed again, block by block.

    With P = exp(logits - lse), a = the output's and b = the log-sum-exp's cotangent, that of the
    logits is P (a v^T - sum_d a out + b): FlashAttention's (arXiv 2205.14135, section 3.1) with b
    beside it.
    """
    batch, heads, num_queries, size = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    query_block, key_block = min(query_block, num_queries), min(key_block, slots)
    scale = jnp.float32(size**-0.5)

    total = jnp.sum(out_cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # Queries that see nothing give nothing, whatever their cotangents are.
    some = lse > -1e29
    shift, lse = jnp.where(some, lse_cotangent - total, 0.0), jnp.where(some, lse, 0.0)
    queries, out_cotangent = (pad_to(a, query_block, 2) for a in (queries, out_cotangent))
    lse, shift = (pad_to(a, query_block, 2) for a in (lse, shift))
    query_positions = pad_to(query_positions, query_block, 1, fill=-1)
    keys, values = pad_to(keys, key_block, 2), pad_to(values, key_block, 2)
    key_positions = pad_to(key_positions, key_block, 2, fill=-1)
    bounds = block_bounds(key_positions, key_block)

    def rows(array: Array, start: Array) -> Array:
        """A block of queries, all of a KV head's in one axis."""
        grouped = array.reshape(batch, kv_heads, group, *array.shape[2:])
        block = lax.dynamic_slice_in_dim(grouped, start, query_block, axis=3)
        return block.reshape(batch, kv_heads, group * query_block, *array.shape[3:])

    def query_step(carry: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], Array]:
        asking, given = rows(queries, start), rows(out_cotangent, start)
        scaled = asking * jnp.asarray(size**-0.5, asking.dtype)  # rounded as the forward pass does
        largest, moved = rows(lse, start), rows(shift, start)
        positions = lax.dynamic_slice_in_dim(query_positions, start, query_block, axis=1)

        def key_step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            into_queries, into_keys, into_values = carry
            at = index * key_block
            k = lax.dynamic_slice_in_dim(keys, at, key_block, axis=2)
            v = lax.dynamic_slice_in_dim(values, at, key_block, axis=2)
            slot = lax.dynamic_slice_in_dim(key_positions, at, key_block, axis=2)
            seen = visible(positions[:, None], slot, window)[:, :, None]
            shape = (batch, kv_heads, group, query_block, key_block)
            seen = jnp.broadcast_to(seen, shape).reshape(batch, kv_heads, -1, key_block)
            logits = _product("bkqd,bksd->bkqs", scaled, k)
            weights = jnp.exp(jnp.where(seen, logits - largest[..., None], -jnp.inf))
            towards = _product("bkqd,bksd->bkqs", given, v) + moved[..., None]
            error = (weights * towards * scale).astype(k.dtype)
            weights = weights.astype(v.dtype)
            into_queries += _product("bkqs,bksd->bkqd", error, k)
            into_keys = _added(into_keys, at, _product("bkqs,bkqd->bksd", error, asking))
            into_values = _added(into_values, at, _product("bkqs,bkqd->bksd", weights, given))
            return into_queries, into_keys, into_values

        first, last = visible_range(bounds, positions, window)
        start_state = (jnp.zeros(asking.shape, jnp.float32), *carry)
        mine, *carry_now = lax.fori_loop(first, last, key_step, start_state)
        return (carry_now[0], carry_now[1]), mine.reshape(batch, heads, query_block, size)

    starts = jnp.arange(0, query_positions.shape[1], query_block)
    nothing = jnp.zeros(keys.shape, jnp.float32)
    with jax.named_scope("attention_gradient"):
        (for_keys, for_values), blocks = lax.scan(query_step, (nothing, nothing), starts)
    for_queries = jnp.moveaxis(blocks, 0, 2).reshape(batch, heads, -1, size)
    return (
        for_queries[:, :, :num_queries].astype(queries.dtype),
        for_keys[:, :, :slots].astype(keys.dtype),
        for_values[:, :, :slots].astype(values.dtype),
    )


def _product(formula: str, left: Array, right: Array) -> Array:
    right = right.astype(left.dtype)
    return jnp.einsum(formula, left, right, preferred_element_type=jnp.float32)


def _added(whole: Array, at: Array, block: Array) -> Array:
    """`block` added to the slots from `at` on."""
    now = lax.dynamic_slice_in_dim(whole, at, block.shape[2], axis=2) + block
    return lax.dynamic_update_slice_in_dim(whole, now, at, axis=2)
