"""The write of a latent memory over blocks of tokens: scratch of one block, whatever is evicted.

Per token of K heads that is 4 K D M FLOPs in float32 (2.1 million at Llama-3.1-8B's sizes) for the
4 K D bytes of its keys and values: some 500 FLOPs per byte, so XLA's matrix products are what it
takes, and a kernel could save nothing but traffic that hides behind them. A block is long enough
that reading and writing M once per block (8 M K D bytes) stays below the block's own traffic.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from kernels_pallas.latent_memory.features import normalised, product, token_ranks

_BLOCK = 2048


def memory_update(
    weights: Float[Array, "K D M"],
    values_state: Float32[Array, "B *n"],
    squares_state: Float32[Array, "B *m"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    evicted: Bool[Array, "B K S"],
    kept: Float32[Array, " B"],
    *,
    eta: float = 1.0,
    normalise: bool = True,
    aligned: bool = False,
    block: int = _BLOCK,
) -> tuple[Float32[Array, "B *n"], Float32[Array, "B *m"]]:
    """As the reference, for heads that hold a position once.

    Differentiable but for a shared memory whose slots are not aligned: that loop is as long as
    there are tokens, which reverse mode refuses.
    """
    batch, heads, slots, _ = keys.shape
    block, per_head = min(block, slots), values_state.ndim == 4
    state = (values_state, squares_state)
    factors = [kept.reshape(-1, *(1,) * (array.ndim - 1)) for array in state]
    start = tuple(factor * array for factor, array in zip(factors, state, strict=True))

    def add(state: Any, k: Array, v: Array, there: Array) -> Any:
        """Entries [B, K, N, D], entry n of every head being one token."""
        k = jnp.where(there[..., None], k.astype(jnp.float32), 0.0)
        v = jnp.where(there[..., None], v.astype(jnp.float32), 0.0)
        if per_head:
            phi = normalised(product("bknd,kdm->bknm", k, weights), normalise)
            products = product("bknm,bknd->bkmd", phi, v)
            squares = jnp.sum(jnp.square(phi), axis=2)
        else:
            # Heads side by side, so that each product contracts one axis.
            k, v = (jnp.swapaxes(array, 1, 2).reshape(batch, block, -1) for array in (k, v))
            wide = weights.reshape(-1, weights.shape[-1])
            phi = normalised(product("bnf,fm->bnm", k, wide), normalise)
            products = product("bnm,bnf->bmf", phi, v)
            squares = jnp.sum(jnp.square(phi), axis=1)
        return state[0] + eta * products, state[1] + eta * squares

    if per_head or aligned:

        @jax.checkpoint
        def step(state: Any, index: Array) -> tuple[Any, None]:
            # The last block ends with the slots: to pad would copy them all.
            at = jnp.minimum(index * block, slots - block)
            k, v, gone = (
                lax.dynamic_slice_in_dim(array, at, block, axis=2)
                for array in (keys, values, evicted)
            )
            fresh = at + jnp.arange(block, dtype=jnp.int32) >= index * block
            return add(state, k, v, gone & fresh[None, None]), None

        return lax.scan(step, start, jnp.arange(-(-slots // block), dtype=jnp.int32))[0]

    # Slot of every token in every head, S where it has none.
    token = token_ranks(positions, evicted)
    token = jnp.where(evicted, token, heads * slots)
    row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    place = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None, None], token.shape)
    slot = jnp.full((batch, heads, heads * slots), slots, jnp.int32)
    slot = slot.at[row, head, token].set(place, mode="drop", unique_indices=True)
    last = jnp.max(jnp.where(evicted, token, -1))

    def gather_step(index: Array, state: Any) -> Any:
        at = jnp.minimum(index * block, heads * slots - block)
        here = lax.dynamic_slice_in_dim(slot, at, block, axis=2)
        fresh = at + jnp.arange(block, dtype=jnp.int32) >= index * block
        there = (here < slots) & fresh[None, None]
        where = jnp.minimum(here, slots - 1)[..., None]
        k, v = (
            jnp.take_along_axis(array, where, axis=2, mode="promise_in_bounds")
            for array in (keys, values)
        )
        return add(state, k, v, there)

    return lax.fori_loop(0, last // block + 1, gather_step, start)
