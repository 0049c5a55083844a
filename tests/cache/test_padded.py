"""The padded cache by itself: append, keep, rows, bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.policies.observation import State
from tests import tiny

LAYERS, BATCH, HEADS, SLOTS, SIZE = 2, 3, 2, 6, 4


def empty(batch: int = BATCH, slots: int = SLOTS, state: bool = True) -> kvjax.PaddedCache:
    lead = (LAYERS, batch, HEADS, slots)
    return kvjax.PaddedCache.empty(
        num_layers=LAYERS,
        batch=batch,
        num_kv_heads=HEADS,
        capacity=slots,
        head_dim=SIZE,
        dtype=jnp.float32,
        policy_state=State(slots={"mass": jnp.zeros(lead)}) if state else None,
    )


def tokens(count: int, seed: int, batch: int = BATCH):
    draw = np.random.default_rng(seed)
    shape = (LAYERS, batch, HEADS, count, SIZE)
    return tuple(jnp.asarray(draw.standard_normal(shape), jnp.float32) for _ in range(2))


def grown(cache: kvjax.PaddedCache, count: int, value: float) -> State:
    mass = cache.policy_state.slots["mass"]
    fresh = jnp.full((*mass.shape[:3], count), value)
    return State(slots={"mass": jnp.concatenate([mass, fresh], axis=3)})


append = jax.jit(lambda cache, *new: cache.append(*new))
keep = jax.jit(lambda cache, *new: cache.keep(*new))


def filled(counts=(4, 2, 0)) -> tuple[kvjax.PaddedCache, jax.Array, jax.Array]:
    cache = empty()
    keys, values = tokens(4, 0)
    place = np.arange(4)[None]
    positions = np.where(place < np.array(counts)[:, None], place, -1)
    cache = append(cache, keys, values, jnp.asarray(positions), grown(cache, 4, 1.0))
    return cache, keys, values


def test_an_empty_cache_holds_nothing():
    cache = empty()
    assert (np.asarray(cache.positions) == -1).all()
    assert (np.asarray(cache.lengths) == 0).all()
    assert cache.capacity == SLOTS
    with pytest.raises(ValueError, match="capacity 0"):
        empty(slots=0)


def test_append_writes_valid_tokens_behind_the_last_slot_of_each_row():
    cache, keys, _ = filled()
    np.testing.assert_array_equal(cache.lengths[0, :, 0], [4, 2, 0])
    np.testing.assert_array_equal(cache.next_position, [4, 2, 0])
    np.testing.assert_array_equal(cache.positions[1, 0, 1], [0, 1, 2, 3, -1, -1])
    np.testing.assert_array_equal(cache.positions[1, 1, 1], [0, 1, -1, -1, -1, -1])
    np.testing.assert_array_equal(cache.keys[:, 0, :, :4], keys[:, 0])
    np.testing.assert_array_equal(cache.keys[:, 1, :, 2:], 0)
    np.testing.assert_array_equal(cache.policy_state.slots["mass"][0, 1, 0], [1, 1, 0, 0, 0, 0])
    more, _ = tokens(1, 1)
    cache = append(cache, more, more, jnp.array([[4], [2], [0]]), grown(cache, 1, 7.0))
    np.testing.assert_array_equal(cache.keys[:, 1, :, 2], more[:, 1, :, 0])
    np.testing.assert_array_equal(cache.policy_state.slots["mass"][0, 1, 0], [1, 1, 7, 0, 0, 0])


def test_tokens_without_a_slot_are_counted_and_dropped():
    cache, _, _ = filled()
    before = np.asarray(cache.keys)
    keys, values = tokens(4, 2)
    positions = jnp.array([[4, 5, 6, 7], [2, 3, -1, -1], [-1] * 4])
    cache = append(cache, keys, values, positions, grown(cache, 4, 2.0))
    np.testing.assert_array_equal(cache.overflowed, [2, 0, 0])
    np.testing.assert_array_equal(cache.next_position, [8, 4, 0])
    np.testing.assert_array_equal(cache.lengths[1, :, 1], [6, 4, 0])
    np.testing.assert_array_equal(cache.positions[0, 0, 0], range(6))
    np.testing.assert_array_equal(cache.keys[:, 0, :, :4], before[:, 0, :, :4])
    np.testing.assert_array_equal(cache.keys[:, 2], before[:, 2])


def test_keep_compacts_what_is_marked_of_slots_and_new_tokens():
    cache, _, _ = filled()
    new_keys, new_values = tokens(3, 3)
    positions = np.array([[4, 5, 6], [2, -1, -1], [-1, -1, -1]], np.int32)
    draw = np.random.default_rng(4)
    union = np.concatenate(
        [np.asarray(cache.positions), np.broadcast_to(positions[None, :, None], (2, 3, 2, 3))],
        axis=3,
    )
    marked = (draw.random(union.shape) < 0.6) & (union >= 0)
    state = grown(cache, 3, 5.0)
    found = keep(cache, jnp.asarray(marked), new_keys, new_values, jnp.asarray(positions), state)
    np.testing.assert_array_equal(found.next_position, [7, 3, 0])
    all_keys = np.concatenate([np.asarray(cache.keys), np.asarray(new_keys)], axis=3)
    all_values = np.concatenate([np.asarray(cache.values), np.asarray(new_values)], axis=3)
    mass = np.asarray(state.slots["mass"])
    for head in np.ndindex(LAYERS, BATCH, HEADS):
        chosen = np.flatnonzero(marked[head])[:SLOTS]
        count = len(chosen)
        assert int(found.lengths[head]) == count
        np.testing.assert_array_equal(found.positions[head][:count], union[head][chosen])
        np.testing.assert_array_equal(found.positions[head][count:], -1)
        np.testing.assert_array_equal(found.keys[head][:count], all_keys[head][chosen])
        np.testing.assert_array_equal(found.values[head][:count], all_values[head][chosen])
        np.testing.assert_array_equal(
            found.policy_state.slots["mass"][head][:count], mass[head][chosen]
        )


def test_bytes_are_the_sum_of_all_arrays():
    cache = empty()
    heads = LAYERS * BATCH * HEADS
    wanted = heads * SLOTS * (2 * SIZE * 4 + 4 + 4) + heads * 4 + 2 * BATCH * 4
    assert kvjax.nbytes(cache) == wanted


def test_rows_are_taken_repeated_and_stacked():
    cache, _, _ = filled()
    parts = [kvjax.take_rows(cache, [row]) for row in range(BATCH)]
    with tiny.as_installed():  # shapes are compared without the batch axis
        stacked = kvjax.stack_rows(parts)
    jax.tree.map(np.testing.assert_array_equal, stacked, cache)
    twice = kvjax.take_rows(cache, [1, 1, 0])
    np.testing.assert_array_equal(twice.next_position, [2, 2, 4])
    np.testing.assert_array_equal(twice.keys[:, 2], cache.keys[:, 0])
    np.testing.assert_array_equal(
        twice.policy_state.slots["mass"][:, 1], cache.policy_state.slots["mass"][:, 1]
    )


def test_rows_of_different_caches_do_not_stack():
    for other in (empty(slots=SLOTS + 1), empty(state=False)):
        with tiny.as_installed(), pytest.raises(ValueError, match="stack_rows"):
            kvjax.stack_rows([empty(), other])


def test_a_cache_passes_through_jit_and_back_unchanged():
    cache, _, _ = filled()
    same = jax.jit(lambda tree: tree)(cache)
    assert jax.tree.structure(same) == jax.tree.structure(cache)
    jax.tree.map(np.testing.assert_array_equal, same, cache)
