"""Write and read of a latent memory with every feature in memory: the definition.

Paper: IndexMem (arXiv 2605.25475). With E the tokens that one cut evicts,

    write    M <- kept M + eta sum over i in E of phi(k_i) v_i^T
             b <- kept b + eta sum over i in E of phi(k_i) * phi(k_i)
    read     m(q) = phi(q)^T M / ((phi(q) * phi(q))^T b + eps)

A shared memory has one phi of all KV heads' keys together, and M holds their values side by side:
[B, M, K D]. A memory per head has K of both: M is [B, K, m, D].
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from kernels_pallas.latent_memory.features import normalised, product, token_ranks


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
) -> tuple[Float32[Array, "B *n"], Float32[Array, "B *m"]]:
    """(M, b) after the marked entries are written; phi is `weights` applied to keys.

    In a shared memory an entry is one head's part of a token: parts of one position are summed
    before phi is normalised, 0 standing for heads that do not evict it. `aligned` says that slot s
    is the same token in every head. Entries not evicted may hold anything.
    """
    k = jnp.where(evicted[..., None], keys.astype(jnp.float32), 0.0)
    v = jnp.where(evicted[..., None], values.astype(jnp.float32), 0.0)
    if values_state.ndim == 4:
        phi = normalised(product("bksd,kdm->bksm", k, weights), normalise)
        products = product("bksm,bksd->bkmd", phi, v)
        squares = jnp.sum(jnp.square(phi), axis=2)
    else:
        if aligned:
            phi = normalised(product("bksd,kdm->bsm", k, weights), normalise)
            products = product("bsm,bksd->bmkd", phi, v)
        else:
            parts = product("bksd,kdm->bksm", k, weights)
            token = token_ranks(positions, evicted)
            row = jnp.arange(k.shape[0])[:, None, None]
            count = token.shape[1] * token.shape[2]
            sums = jnp.zeros((k.shape[0], count, parts.shape[-1]), jnp.float32)
            phi = normalised(sums.at[row, token].add(parts), normalise)
            products = product("bksm,bksd->bmkd", phi[row, token], v)
        products = products.reshape(*products.shape[:2], -1)
        squares = jnp.sum(jnp.square(phi), axis=1)

    def added(old: Float32[Array, "B *n"], new: Float32[Array, "B *n"]) -> Float32[Array, "B *n"]:
        factor = jnp.broadcast_to(kept, old.shape[:1]).reshape(-1, *(1,) * (old.ndim - 1))
        return factor * old + eta * new

    return added(values_state, products), added(squares_state, squares)


def memory_read(
    weights: Float[Array, "N D M"],
    values_state: Float32[Array, "B *n"],
    squares_state: Float32[Array, "B *m"],
    queries: Float[Array, "B H T D"],
    *,
    eps: float = 1e-6,
    normalise: bool = True,
) -> tuple[Float32[Array, "B H T D"], Float32[Array, "B H T"]]:
    """m of every query, exactly 0 from an empty memory, and its mass (phi * phi)^T b / M.

    In a shared memory phi is of all H queries of a token (N = H), or of each group's mean (N = K).
    """
    q = queries.astype(jnp.float32)
    batch, heads, tokens, dim = q.shape
    if values_state.ndim == 4:
        q = q.reshape(batch, weights.shape[0], -1, tokens, dim)
        phi = normalised(product("bkgtd,kdm->bkgtm", q, weights), normalise)
        found = product("bkgtm,bkmd->bkgtd", phi, values_state)
        total = product("bkgtm,bkm->bkgt", jnp.square(phi), squares_state)
        found, total = found.reshape(queries.shape), total.reshape(batch, heads, tokens)
    else:
        num_kv_heads = values_state.shape[-1] // dim
        if weights.shape[0] != heads:
            q = jnp.mean(q.reshape(batch, num_kv_heads, -1, tokens, dim), axis=2)
        phi = normalised(product("bhtd,hdm->btm", q, weights), normalise)
        stored = values_state.reshape(batch, -1, num_kv_heads, dim)
        found = product("btm,bmkd->bktd", phi, stored)
        found = jnp.repeat(found, heads // num_kv_heads, axis=1)
        total = product("btm,bm->bt", jnp.square(phi), squares_state)
        total = jnp.broadcast_to(total[:, None], (batch, heads, tokens))
    there = (total > 0)[..., None]
    m = found / jnp.where(there, (total + eps)[..., None], 1.0)
    return jnp.where(there, m, 0.0), total / phi.shape[-1]
