"""Key re-rotation: kept keys moved to contiguous positions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kvjax.cache import Cache, PaddedCache
from kvjax.cache.entries import entry_positions, slot_state
from kvjax.eviction import QUERIES, QUERY_POSITIONS
from kvjax.models import rope
from kvjax.models.decoder import Decoder


def rerotate(
    model: Decoder,
    cache: Cache,
    new_positions: Int[Array, "L B K S"] | None = None,
    next_position: Int[Array, " B"] | None = None,
) -> Cache:
    """Moves every kept key to a new position, by default to contiguous ones.

    k' = R(new) R(old)^-1 k, with the frequencies the model itself uses (linear, Llama-3, YaRN).
    The angles are rounded as the model rounds them, and YaRN's attention factor, which the
    stored keys have already, is not applied again, so k' is what the model would have stored at
    the new position.

    Args:
      model: the decoder that filled the cache.
      cache: the cache; its keys stand after RoPE at their positions (`entry_positions`).
      new_positions: the new position of every slot, increasing along each head, -1 exactly where
        the slot is empty. Default: an entry's rank in its head, 0 to n - 1. In sliding-window
        layers entries keep their distance to the next token instead, as far as the window
        reaches, because ranks of a shorter head would put them out of the window.
      next_position: where the next token goes; default one behind the largest new position of the
        row, which for ranks is the count of the fullest head.

    The recent queries that some policies keep move with `next_position`. Other policy state is
    left as it is, so ages derived from positions become ages in kept tokens.

    Raises:
      ValueError: new positions of another shape, out of order, or given to empty slots; a cache
        that carries a memory of evicted entries, whose positions are not kept.
    """
    if cache.policy_state.memory:
        raise ValueError(
            "rerotate: this cache carries a memory of evicted entries, which keep their old "
            "positions; allowed are caches of policies without one"
        )
    positions = entry_positions(cache)
    if new_positions is None:
        new_positions = _contiguous(model, cache, positions)
    else:
        _check(positions, new_positions)
    if next_position is None:
        next_position = jnp.max(new_positions, axis=(0, 2, 3)) + 1
    return _rerotate(model, cache, positions, new_positions, next_position)


def _contiguous(
    model: Decoder, cache: Cache, positions: Int[Array, "L B K S"]
) -> Int[Array, "L B K S"]:
    rank = jnp.arange(positions.shape[-1], dtype=jnp.int32)[None, None, None]
    shift = jnp.max(cache.lengths, axis=(0, 2)) - cache.next_position
    # Both terms grow along a head, and inside the window, which is kept without holes, the
    # second is never the smaller one.
    shifted = jnp.maximum(rank, positions + shift[None, :, None, None])
    is_local = jnp.asarray(model.windows < NO_WINDOW)[:, None, None, None]
    return jnp.where(positions < 0, -1, jnp.where(is_local, shifted, rank))


def _check(old: Array, new: Array) -> None:
    if new.shape != old.shape:
        raise ValueError(f"new positions of shape {new.shape}: allowed is {old.shape}")
    if isinstance(new, jax.core.Tracer) or isinstance(old, jax.core.Tracer):
        return
    before, after = np.asarray(old), np.asarray(new)
    if np.any((before < 0) != (after < 0)):
        raise ValueError("new positions: allowed is -1 exactly where the cache's slot is empty")
    grows = np.diff(after, axis=-1) > 0
    if not np.all(grows | (after[..., 1:] < 0)):
        raise ValueError("new positions: they have to grow along every head")


@jax.jit
def _rerotate(
    model: Decoder,
    cache: Cache,
    positions: Int[Array, "L B K S"],
    new_positions: Int[Array, "L B K S"],
    next_position: Int[Array, " B"],
) -> Cache:
    frequencies, _ = model.rope_frequencies
    state = dataclasses.replace(
        cache.policy_state, layer=_moved_queries(model, cache, next_position)
    )
    if isinstance(cache, PaddedCache):
        return dataclasses.replace(
            cache,
            keys=_turn(cache.keys, positions, new_positions, frequencies),
            positions=new_positions,
            next_position=next_position,
            policy_state=state,
        )

    def turned(inputs: Any) -> tuple[Array, Array]:
        view, old, new = inputs
        keys, values, _ = cache.dense(view)
        return _turn(keys, old, new, frequencies), values

    keys, values = lax.map(turned, (cache.views, positions, new_positions))
    state = dataclasses.replace(state, slots=slot_state(cache))
    # The heads hold the pages of as many entries already, so `fill` takes no others.
    return cache.fill(keys, values, new_positions, cache.lengths, next_position, state)


def _moved_queries(
    model: Decoder, cache: Cache, next_position: Int[Array, " B"]
) -> dict[str, Array]:
    layer = cache.policy_state.layer
    if QUERIES not in layer:
        return layer
    queries, old = layer[QUERIES], layer[QUERY_POSITIONS]  # [L, B, H, W, D], [L, B, W]
    shift = (next_position - cache.next_position)[None, :, None]
    new = jnp.where(old >= 0, jnp.maximum(old + shift, -1), -1)
    before = jnp.broadcast_to(old[:, :, None], queries.shape[:-1])
    after = jnp.broadcast_to(new[:, :, None], queries.shape[:-1])
    turned = _turn(queries, before, after, model.rope_frequencies[0])
    return layer | {QUERIES: turned, QUERY_POSITIONS: new}


def _turn(
    x: Float[Array, "*n D"], old: Int[Array, "*n"], new: Int[Array, "*n"], frequencies: Any
) -> Float[Array, "*n D"]:
    """R(new) R(old)^-1 x in float32, from the model's own rounded angles.

    cos(a - b) and sin(a - b) come from the two angles' own sines and cosines: subtracting the
    rounded positions first would turn by another angle than the model did. What stays where it is
    is unchanged to the bit.
    """
    cos_new, sin_new = rope.rotation(jnp.maximum(new, 0), frequencies)
    cos_old, sin_old = rope.rotation(jnp.maximum(old, 0), frequencies)
    cos = cos_new * cos_old + sin_new * sin_old
    sin = sin_new * cos_old - cos_new * sin_old
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.where((old == new)[..., None], x, turned.astype(x.dtype))
