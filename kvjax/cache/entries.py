"""What a cache holds, head by head, whatever its layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from kvjax.cache import Cache, PaddedCache
from kvjax.policies.observation import MODALITY


@jax.jit
def entry_positions(cache: Cache) -> Int[Array, "L B K S"]:
    """The absolute position of every slot of every head, -1 where it is empty."""
    if isinstance(cache, PaddedCache):
        return cache.positions
    return lax.map(lambda view: cache.dense(view)[2], cache.views)


@jax.jit
def slot_state(cache: Cache) -> dict[str, Array]:
    """The slot arrays of policy state, each [L, B, K, S, ...]."""
    if isinstance(cache, PaddedCache) or not cache.policy_state.slots:
        return cache.policy_state.slots
    layers = jnp.arange(cache.num_layers, dtype=jnp.int32)
    return lax.map(lambda inputs: cache.dense_slots(*inputs), (cache.views, layers))


def kept_mask(cache: Cache, length: int, row: int = 0) -> Bool[np.ndarray, "L K T"]:
    """Whether each (layer, KV head) of one row still holds each position below `length`."""
    positions = np.asarray(entry_positions(cache))[:, row]
    layers, heads, _ = positions.shape
    kept = np.zeros((layers, heads, length + 1), bool)
    place = np.where((positions >= 0) & (positions < length), positions, length)
    np.put_along_axis(kept, place, True, axis=2)
    return kept[:, :, :length]


def modality_counts(cache: Cache) -> dict[int, Int[np.ndarray, "L B K"]]:
    """How many entries of each modality every (layer, row, KV head) holds.

    The keys are the ids that occur, in ascending order; 0 is text.

    Raises:
      ValueError: a cache that carries no modalities.
    """
    if MODALITY not in cache.policy_state.slots:
        raise ValueError("modality_counts: this cache carries none, prefill with modalities")
    modality = np.asarray(slot_state(cache)[MODALITY])
    filled = np.asarray(entry_positions(cache)) >= 0
    found = np.unique(modality[filled]).tolist()
    return {identity: np.sum(filled & (modality == identity), axis=3) for identity in found}


def first_range(mask: Bool[np.ndarray, " T"]) -> tuple[int, int]:
    """First and last index of the first run of true values; there has to be one."""
    start = int(np.argmax(mask))
    behind = mask[start:]
    run = len(behind) if behind.all() else int(np.argmin(behind))
    return start, start + run - 1
