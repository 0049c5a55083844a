"""Edits of a cache by position: entries are hidden from a pass, dropped, or overwritten.

What a head no longer holds of the positions named is passed over; every other entry stays as it
is, to the bit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Cache, PaddedCache
from kvjax.cache.entries import entry_positions, slot_state
from kvjax.policies.observation import State

_BEHIND = 2**30  # sorts behind every position


def leading(cache: Cache, slots: int) -> Cache:
    """The first `slots` of every head, to be attended to; for paged caches, whole pages.

    Slots stand in position order, so these hold every entry before position `slots`.
    """
    slots = min(slots, cache.capacity)
    lengths = jnp.minimum(cache.lengths, slots)
    if isinstance(cache, PaddedCache):
        return dataclasses.replace(
            cache,
            keys=cache.keys[:, :, :, :slots],
            values=cache.values[:, :, :, :slots],
            positions=cache.positions[:, :, :, :slots],
            lengths=lengths,
            policy_state=State(),
        )
    table = cache.page_table[:, :, :, : -(-slots // cache.page_size)]
    return dataclasses.replace(cache, page_table=table, lengths=lengths, policy_state=State())


def hide(cache: Cache, positions: Int[Array, "B M"]) -> Cache:
    """The cache without these positions for whoever attends to it; only for that.

    `positions` ascend, with -1 for padding behind them.
    """
    ascending = _ascending(positions)

    def among(row: Int[Array, " M"], slots: Int[Array, "..."]) -> Bool[Array, "..."]:
        place = jnp.minimum(jnp.searchsorted(row, slots), row.shape[0] - 1)
        return row[place] == slots

    axis = cache.row_axes.get("positions", 0)
    found = jax.vmap(among, in_axes=(0, axis), out_axes=axis)(ascending, cache.positions)
    return dataclasses.replace(cache, positions=jnp.where(found, -1, cache.positions))


def drop(cache: Cache, gone: Bool[Array, "L B K S"]) -> Cache:
    """The cache without the marked slots (in the order of `entry_positions`), compacted.

    Positions and `next_position` stay; slot state goes with its entry.
    """
    positions = entry_positions(cache)
    layers, batch, heads, _ = positions.shape
    nothing = jnp.zeros((layers, batch, heads, 0, cache.head_dim), cache.keys.dtype)
    state = State(slots=slot_state(cache), layer=cache.policy_state.layer)
    no_tokens = jnp.zeros((batch, 0), jnp.int32)
    return cache.keep((positions >= 0) & ~gone, nothing, nothing, no_tokens, state)


def overwrite(
    cache: Cache,
    keys: Float[Array, "l B K M D"],
    values: Float[Array, "l B K M D"],
    positions: Int[Array, "B M"],
) -> Cache:
    """New keys and values for the entries at `positions`, in the first l layers.

    A head that does not hold a position gets nothing for it. Padding has position -1.
    """
    layers, batch, heads = keys.shape[:3]
    held = entry_positions(cache)[:layers]
    slot = _slots_of(held, positions)  # held.shape[3] where there is none
    index: tuple[Array, ...]
    if isinstance(cache, PaddedCache):
        index = (
            jnp.arange(layers)[:, None, None, None],
            jnp.arange(batch)[None, :, None, None],
            jnp.arange(heads)[None, None, :, None],
            slot,
        )
    else:
        page = cache.page_size
        ordinal = jnp.minimum(slot // page, cache.page_table.shape[3] - 1)
        identity = jnp.take_along_axis(cache.page_table[:layers], ordinal, axis=3)
        identity = jnp.where(slot < held.shape[3], identity, cache.keys.shape[1])
        index = (jnp.arange(batch)[None, :, None, None], identity, slot % page)

    def write(into: Array, new: Array) -> Array:
        return into.at[index].set(new.astype(into.dtype), mode="drop", unique_indices=True)

    return dataclasses.replace(
        cache, keys=write(cache.keys, keys), values=write(cache.values, values)
    )


def entries_at(
    cache: Cache, layer: int, positions: Int[Array, "B M"]
) -> tuple[Float[Array, "B K M D"], Float[Array, "B K M D"], Bool[Array, "B K M"]]:
    """Keys and values of one layer at `positions`, and which of them each head holds."""
    view = jax.tree.map(lambda array: array[layer], cache.views)
    keys, values, held = cache.dense(view)
    slot = _slots_of(held[None], positions)[0]
    index = jnp.minimum(slot, held.shape[2] - 1)[..., None]
    found_keys, found_values = (jnp.take_along_axis(a, index, axis=2) for a in (keys, values))
    return found_keys, found_values, slot < held.shape[2]


def _slots_of(held: Int[Array, "l B K S"], positions: Int[Array, "B M"]) -> Int[Array, "l B K M"]:
    """The slot of every position in every head, S where it is not held."""
    slots = held.shape[3]
    by_head = jax.vmap(jnp.searchsorted, in_axes=(0, None))
    by_layer = jax.vmap(jax.vmap(by_head), in_axes=(0, None))
    place = by_layer(_ascending(held), positions)
    found = jnp.take_along_axis(held, jnp.minimum(place, slots - 1), axis=3)
    wanted = jnp.broadcast_to(positions[None, :, None], found.shape)
    return jnp.where((found == wanted) & (wanted >= 0), place, slots).astype(jnp.int32)


def _ascending(positions: Int[Array, "*n"]) -> Int[Array, "*n"]:
    return jnp.where(positions < 0, _BEHIND, positions)
