"""Attention under retention decay in blocks: memory linear in T, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.retention_attention.segments import Tokens, tokens, visible, visible_ranges


class _Tensors(NamedTuple):
    """What is differentiated, padded to whole blocks, query heads beside their KV head."""

    queries: Float[Array, "B K G T D"]
    keys: Float[Array, "B K S D"]
    values: Float[Array, "B K S D"]
    log_beta: Float[Array, "B K S"]


class _Mask(NamedTuple):
    """Who may see whom; queries and keys may be padded to different lengths."""

    queries: Tokens
    keys: Tokens
    window: Int[Array, ""]


def retention_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    log_beta: Float[Array, "B K T"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    asking: Tokens | None = None,
    query_block: int = 128,
    key_block: int = 128,
) -> Float[Array, "B H Q D"]:
    """As the reference, by FlashAttention's two recurrences (arXiv 2205.14135). Reverse mode only.

    `asking` says which tokens of the rows the queries are of, in any order; None for all of them.
    Only output and log-sum-exp are kept for the backward pass, which makes the tiles again. Tiles
    that lie above the diagonal, outside the window, or across documents in every row cost nothing.
    """
    blocks = _blocks(queries.shape[2], query_block, key_block)
    inputs = _padded(*blocks, queries, keys, values, log_beta, segments, window, asking)
    with jax.named_scope("retention_attention"):
        out = _attend(*blocks, *inputs)
    return out[:, :, :, : queries.shape[2]].reshape(queries.shape)


def segment_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K T D"],
    values: Float[Array, "B K T D"],
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    asking: Tokens | None = None,
    query_block: int = 128,
    key_block: int = 128,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference. Forward only: no rule is needed to differentiate what is frozen."""
    blocks = _blocks(queries.shape[2], query_block, key_block)
    still = jnp.zeros(keys.shape[:3], jnp.float32)
    inputs = _padded(*blocks, queries, keys, values, still, segments, window, asking)
    with jax.named_scope("segment_attention"):
        out, (*_, lse) = _forward(*blocks, *inputs)
    out, lse = (array[:, :, :, : queries.shape[2]] for array in (out, lse))
    return out.reshape(queries.shape), lse.reshape(queries.shape[:3])


def _blocks(length: int, query_block: int, key_block: int) -> tuple[int, int]:
    return min(query_block, length), min(key_block, length)


def _padded(
    query_block: int,
    key_block: int,
    queries: Array,
    keys: Array,
    values: Array,
    log_beta: Array,
    segments: Array,
    window: int | Array,
    asking: Tokens | None,
) -> tuple[_Tensors, _Mask]:
    batch, kv_heads, _, size = keys.shape
    everyone = tokens(segments)
    asking = everyone if asking is None else asking
    tensors = _Tensors(
        pad_to(queries.reshape(batch, kv_heads, -1, queries.shape[2], size), query_block, 3),
        pad_to(keys, key_block, 2),
        pad_to(values, key_block, 2),
        # The lowest finite number for -inf, of which age 0 would make NaN.
        pad_to(jnp.maximum(log_beta, jnp.finfo(jnp.float32).min), key_block, 2),
    )
    return tensors, _Mask(
        asking.padded(query_block), everyone.padded(key_block), jnp.asarray(window, jnp.int32)
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    query_block: int, key_block: int, tensors: _Tensors, mask: _Mask
) -> Float[Array, "B K G T D"]:
    return _forward(query_block, key_block, tensors, mask)[0]


def _take(array: Array, at: Array, block: int) -> Array:
    """`block` tokens of axis 2 from `at`."""
    return lax.dynamic_slice_in_dim(array, at, block, axis=2)


def _add(array: Array, part: Array, at: Array) -> Array:
    """`array` with `part` added on axis 2 from `at`."""
    old = lax.dynamic_slice_in_dim(array, at, part.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(array, old + part, at, axis=2)


def _query_blocks(array: Array, block: int) -> Array:
    """[B, K, G, T, ...] as a stack [N, B, K, G block, ...]: one axis for a KV head's rows.

    XLA's CPU matrix product is twice as slow with two.
    """
    batch, kv_heads, group, length = array.shape[:4]
    split = array.reshape(batch, kv_heads, group, length // block, block, *array.shape[4:])
    split = jnp.moveaxis(split, 3, 0)
    return split.reshape(-1, batch, kv_heads, group * block, *array.shape[4:])


def _from_query_blocks(stack: Array, group: int) -> Array:
    """`_query_blocks` undone."""
    count, batch, kv_heads, rows = stack.shape[:4]
    split = stack.reshape(count, batch, kv_heads, group, rows // group, *stack.shape[4:])
    split = jnp.moveaxis(split, 0, 3)
    return split.reshape(batch, kv_heads, group, -1, *stack.shape[4:])


def _tile(
    tensors: _Tensors, mask: _Mask, q: Array, asking: Tokens, at: Array, key_block: int
) -> tuple[Array, Array]:
    """Masked logits [B, K, R, S] of one tile in float32, and ages [B, Q, S]."""
    k = _take(tensors.keys, at, key_block)
    decay = _take(tensors.log_beta, at, key_block)
    held = mask.keys.part(at, key_block)
    logits = jnp.einsum("bkrd,bksd->bkrs", q, k, preferred_element_type=jnp.float32)
    shape = logits.shape
    seen = visible(asking, held, mask.window)
    age = (asking.positions[:, :, None] - held.positions[:, None, :]).astype(jnp.float32)
    bias = age[:, None, None] * decay[:, :, None, None]
    logits = logits.reshape(*shape[:2], -1, asking.positions.shape[1], key_block)
    logits = logits * jnp.float32(q.shape[-1] ** -0.5) + bias
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    return logits.reshape(shape), age


def _forward(
    query_block: int, key_block: int, tensors: _Tensors, mask: _Mask
) -> tuple[Float[Array, "B K G T D"], tuple[_Tensors, _Mask, Array, Array]]:
    group, size = tensors.queries.shape[2], tensors.queries.shape[4]
    first, last = visible_ranges(mask.queries, mask.keys, query_block, key_block, mask.window)

    def query_step(block: tuple[Array, Tokens, Array, Array]) -> tuple[Array, Array]:
        q, asking, first, last = block

        def key_step(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            largest, total, out = carry
            logits, _ = _tile(tensors, mask, q, asking, index * key_block, key_block)
            v = _take(tensors.values, index * key_block, key_block)
            now = jnp.maximum(largest, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - now[..., None])
            shrink = jnp.exp(largest - now)
            add = jnp.einsum(
                "bkrs,bksd->bkrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            total = total * shrink + jnp.sum(weights, axis=-1)
            return now, total, out * shrink[..., None] + add

        rows = q.shape[:3]
        # A finite start keeps exp(-inf - start) at 0 for blocks in which nothing is visible.
        state = (
            jnp.full(rows, -1e30, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((*rows, size), jnp.float32),
        )
        largest, total, out = lax.fori_loop(first, last, key_step, state)
        out = out / jnp.maximum(total, 1e-30)[..., None]
        return out.astype(q.dtype), jnp.log(total) + largest

    out, lse = lax.map(
        query_step,
        (
            _query_blocks(tensors.queries, query_block),
            mask.queries.blocks(query_block),
            first,
            last,
        ),
    )
    out = _from_query_blocks(out, group)
    return out, (tensors, mask, out, _from_query_blocks(lse, group))


def _backward(
    query_block: int,
    key_block: int,
    saved: tuple[_Tensors, _Mask, Array, Array],
    d_out: Float[Array, "B K G T D"],
) -> tuple[_Tensors, None]:
    """Logits get dz = p (d_out v - d_out out); log_beta_j sums dz_ij (i - j) over group and i."""
    tensors, mask, out, lse = saved
    # A window that is a constant of the trace comes back from the residuals as a NumPy scalar.
    mask = mask._replace(window=jnp.asarray(mask.window, jnp.int32))
    batch, kv_heads, group, _, size = tensors.queries.shape
    scale = jnp.float32(size**-0.5)
    offset = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    first, last = visible_ranges(mask.queries, mask.keys, query_block, key_block, mask.window)

    def query_step(
        keys_side: tuple[Array, Array, Array], block: tuple[Any, ...]
    ) -> tuple[tuple[Array, Array, Array], Array]:
        q, asking, d_o, row_lse, row_offset, first, last = block

        def key_step(
            index: Array, carry: tuple[Array, tuple[Array, Array, Array]]
        ) -> tuple[Array, tuple[Array, Array, Array]]:
            d_q, (d_keys, d_values, d_log_beta) = carry
            at = index * key_block
            logits, age = _tile(tensors, mask, q, asking, at, key_block)
            k = _take(tensors.keys, at, key_block)
            v = _take(tensors.values, at, key_block)
            # Rows that see nothing have -inf twice, whose difference would be NaN.
            weights = jnp.exp(logits - jnp.maximum(row_lse, -1e30)[..., None])
            d_weights = jnp.einsum("bkrd,bksd->bkrs", d_o, v, preferred_element_type=jnp.float32)
            d_logits = weights * (d_weights - row_offset[..., None])
            split = d_logits.reshape(batch, kv_heads, group, query_block, key_block)
            d_decay = jnp.sum(split * age[:, None, None], axis=(2, 3))

            d_scaled = (d_logits * scale).astype(q.dtype)
            product = partial(jnp.einsum, preferred_element_type=jnp.float32)
            d_q = d_q + product("bkrs,bksd->bkrd", d_scaled, k)
            d_k = product("bkrs,bkrd->bksd", d_scaled, q)
            d_v = product("bkrs,bkrd->bksd", weights.astype(d_o.dtype), d_o)
            return d_q, (
                _add(d_keys, d_k, at),
                _add(d_values, d_v, at),
                _add(d_log_beta, d_decay, at),
            )

        state = (jnp.zeros(q.shape, jnp.float32), keys_side)
        d_q, keys_side = lax.fori_loop(first, last, key_step, state)
        return keys_side, d_q.astype(q.dtype)

    start = (
        jnp.zeros(tensors.keys.shape, jnp.float32),
        jnp.zeros(tensors.values.shape, jnp.float32),
        jnp.zeros(tensors.log_beta.shape, jnp.float32),
    )
    (d_keys, d_values, d_log_beta), d_queries = lax.scan(
        query_step,
        start,
        (
            _query_blocks(tensors.queries, query_block),
            mask.queries.blocks(query_block),
            *(_query_blocks(array, query_block) for array in (d_out, lse, offset)),
            first,
            last,
        ),
    )
    gradients = _Tensors(
        _from_query_blocks(d_queries, group),
        d_keys.astype(tensors.keys.dtype),
        d_values.astype(tensors.values.dtype),
        d_log_beta,
    )
    return gradients, None


_attend.defvjp(_forward, _backward)
