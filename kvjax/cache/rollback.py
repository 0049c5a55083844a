"""Rolling a cache back to an earlier position."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import Cache
from kvjax.cache.entries import entry_positions, slot_state
from kvjax.eviction import QUERIES, QUERY_POSITIONS
from kvjax.policies.observation import NEWEST, State


def rollback(cache: Cache, to_position: Int[Array, " B"]) -> Cache:
    """The cache without its entries at `to_position` and behind; the next token goes there.

    Defined on positions: entries before `to_position` that were evicted in the meantime stay
    gone (`kept_mask` says which). Slot state goes with its entry and the recent queries are cut;
    sums over queries, such as accumulated attention, keep what later queries added.

    Raises:
      ValueError: a memory of evicted entries that holds some from `to_position` or behind, which
        cannot be taken out of it.
    """
    if NEWEST in cache.policy_state.layer:
        _check_memory(cache.policy_state.layer[NEWEST], to_position)
    return _rollback(cache, to_position)


def _check_memory(newest: Int[Array, "L B"], to_position: Int[Array, " B"]) -> None:
    if isinstance(newest, jax.core.Tracer) or isinstance(to_position, jax.core.Tracer):
        raise ValueError("rollback of a cache that carries a memory: allowed outside jit only")
    written, to = np.max(np.asarray(newest), axis=0), np.asarray(to_position)
    if (late := written >= to).any():
        row = int(np.argmax(late))
        raise ValueError(
            f"rollback to {to[row]}: the memory holds evicted tokens up to position "
            f"{written[row]}, which cannot be taken out of it; allowed are positions from "
            f"{written[row] + 1} on"
        )


@jax.jit
def _rollback(cache: Cache, to_position: Int[Array, " B"]) -> Cache:
    positions = entry_positions(cache)
    keep = (positions >= 0) & (positions < to_position[None, :, None, None])
    layers, batch, heads, _ = positions.shape
    nothing = jnp.zeros((layers, batch, heads, 0, cache.keys.shape[-1]), cache.keys.dtype)
    state = State(
        slots=slot_state(cache), layer=_recent_queries(cache.policy_state.layer, to_position)
    )
    cut = cache.keep(keep, nothing, nothing, jnp.zeros((batch, 0), jnp.int32), state)
    return dataclasses.replace(cut, next_position=jnp.minimum(to_position, cache.next_position))


def _recent_queries(layer: dict[str, Array], to_position: Int[Array, " B"]) -> dict[str, Array]:
    """The queries before `to_position`, moved to the end: newest last, as they are kept."""
    if QUERIES not in layer:
        return layer
    queries, positions = layer[QUERIES], layer[QUERY_POSITIONS]  # [L, B, H, W, D], [L, B, W]
    window = positions.shape[-1]
    gone = jnp.sum(positions >= to_position[None, :, None], axis=-1, keepdims=True)
    source = jnp.arange(window)[None, None] - gone
    index = jnp.maximum(source, 0)
    moved = jnp.where(source >= 0, jnp.take_along_axis(positions, index, axis=-1), -1)
    return layer | {
        QUERIES: jnp.take_along_axis(queries, index[:, :, None, :, None], axis=3),
        QUERY_POSITIONS: moved,
    }
