"""Re-rotation moves keys to where the model itself would have put them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kernels_pallas.attention import NO_WINDOW
from kvjax.cache.entries import entry_positions
from kvjax.cache.rerotate import rerotate
from kvjax.eviction import QUERIES, QUERY_POSITIONS
from kvjax.models import rope
from kvjax.models.config import RopeConfig
from tests.models.small import BASE, random_model

LENGTH, BUDGET = 60, 14
PROMPTS = [
    [int(i) for i in np.random.default_rng(seed).integers(0, 300, LENGTH)] for seed in range(2)
]
ROPES = {
    "default": RopeConfig(),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "llama3": RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_length=64),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_max_length=32),
    "yarn, factor given": RopeConfig(
        kind="yarn", factor=4.0, original_max_length=32, attention_factor=1.7
    ),
}


@functools.cache
def decoder(name: str) -> kvjax.Decoder:
    config = dataclasses.replace(BASE, rope=ROPES[name], max_length=10_000)
    return kvjax.Decoder(config, random_model().parameters)


def evicted(model: kvjax.Decoder, name: str = "knorm", **options: object):
    policy = kvjax.policy(name, **options.pop("policy", {}))
    return kvjax.prefill(model, PROMPTS, policy=policy, budget=BUDGET, **options)[1]


def filled(keys: jax.Array, positions: np.ndarray) -> kvjax.PaddedCache:
    heads = keys.shape[:3]
    return kvjax.PaddedCache(
        keys=keys,
        values=keys + 1,
        positions=jnp.asarray(positions, jnp.int32),
        lengths=jnp.asarray((positions >= 0).sum(axis=-1), jnp.int32),
        next_position=jnp.full(heads[1], positions.max() + 1, jnp.int32),
        overflowed=jnp.zeros(heads[1], jnp.int32),
    )


def some_positions(seed: int) -> np.ndarray:
    """Growing positions for 3 layers, 1 row, 2 heads of 16 slots."""
    rng = np.random.default_rng(seed)
    picked = [rng.choice(9_000, 16, replace=False) for _ in range(6)]
    return np.sort(np.stack(picked)).reshape(3, 1, 2, 16)


def some_keys() -> jax.Array:
    normal = np.random.default_rng(2).normal(size=(3, 1, 2, 16, BASE.head_dim))
    return jnp.asarray(normal, jnp.float32)


@pytest.mark.parametrize("name", ROPES)
def test_keys_equal_rope_of_the_unrotated_keys_at_the_new_positions(name):
    model = decoder(name)
    before_rope = some_keys()
    old, new = some_positions(0), some_positions(1)

    def rotated(positions):
        cos, sin = rope.rotation(jnp.asarray(positions[:, 0]), *rope.rope_frequencies(model.config))
        return rope.apply_rope(before_rope[:, 0], cos, sin)[:, None]

    cache = filled(rotated(old), old)
    moved = rerotate(model, cache, jnp.asarray(new, jnp.int32))
    np.testing.assert_allclose(moved.keys, rotated(new), atol=1e-5)
    assert int(moved.next_position[0]) == int(new.max()) + 1

    contiguous = rerotate(model, cache)
    ranks = np.broadcast_to(np.arange(16), old.shape)
    np.testing.assert_array_equal(contiguous.positions, ranks)
    np.testing.assert_allclose(contiguous.keys, rotated(ranks), atol=1e-5)


@pytest.mark.parametrize("name", ROPES)
def test_there_and_back_is_the_identity(name):
    model = decoder(name)
    positions = some_positions(0)
    positions[0, 0, 1, 11:] = -1
    cache = filled(some_keys(), positions)
    packed = rerotate(model, cache)
    assert not np.allclose(packed.keys, cache.keys, atol=1e-2)
    assert (np.asarray(packed.positions) < 0)[positions < 0].all()
    back = rerotate(model, packed, cache.positions, cache.next_position)
    np.testing.assert_array_equal(back.positions, cache.positions)
    np.testing.assert_array_equal(back.next_position, cache.next_position)
    np.testing.assert_allclose(back.keys, cache.keys, atol=1e-5)
    np.testing.assert_array_equal(packed.values, cache.values)


def test_an_unevicted_cache_is_unchanged():
    model = random_model()
    cache = kvjax.prefill(model, PROMPTS, room=3)[1]
    packed = rerotate(model, cache)
    np.testing.assert_array_equal(packed.positions, cache.positions)
    np.testing.assert_array_equal(packed.next_position, cache.next_position)
    np.testing.assert_allclose(packed.keys, cache.keys, atol=1e-5)


def test_logits_do_not_change_when_all_positions_shift():
    model = random_model()
    cache = kvjax.prefill(model, PROMPTS, room=4)[1]
    shifted = rerotate(model, cache, jnp.where(cache.positions >= 0, cache.positions + 700, -1))
    question = [[5, 6, 7], [8, 9, 10]]
    near, _ = kvjax.extend(model, cache, question)
    far, _ = kvjax.extend(model, shifted, question)
    np.testing.assert_allclose(near, far, atol=2e-4)


def test_uneven_heads_get_ranks_and_the_fullest_decides_the_next_position():
    model = random_model()
    cache = evicted(model, "adakv" if "adakv" in kvjax.policy_names() else "duoattention")
    lengths = np.asarray(cache.lengths)
    packed = rerotate(model, cache)
    positions = np.asarray(packed.positions)
    for index in np.ndindex(lengths.shape):
        count = lengths[index]
        np.testing.assert_array_equal(positions[index][:count], np.arange(count))
        assert (positions[index][count:] == -1).all()
    np.testing.assert_array_equal(packed.next_position, lengths.max(axis=(0, 2)))


def test_local_layers_keep_their_window():
    model = random_model("qwen2")  # windows (None, 7, 7)
    cache = evicted(model)
    packed = rerotate(model, cache)
    for layer, window in enumerate(model.windows):
        if window == NO_WINDOW:
            continue
        before = np.asarray(cache.next_position)[:, None, None] - np.asarray(cache.positions[layer])
        after = np.asarray(packed.next_position)[:, None, None] - np.asarray(
            packed.positions[layer]
        )
        valid = np.asarray(cache.positions[layer]) >= 0
        seen = valid & (before < window)
        np.testing.assert_array_equal(before[seen], after[seen])
        np.testing.assert_array_equal(seen, valid & (after < window))


def test_recent_queries_move_with_the_next_position():
    model = random_model()
    cache = evicted(model, "snapkv", policy={"window": 5, "decode_interval": 4})
    packed = rerotate(model, cache)
    shift = np.asarray(packed.next_position - cache.next_position)
    before, after = cache.policy_state.layer, packed.policy_state.layer
    np.testing.assert_array_equal(
        np.asarray(after[QUERY_POSITIONS]),
        np.asarray(before[QUERY_POSITIONS]) + shift[None, :, None],
    )
    # The product of a query and a key that move alike does not change.
    products = [
        jnp.sum(state[QUERIES][..., -1, :][:, :, ::2] * c.keys[:, :, :, BUDGET - 1], axis=-1)
        for state, c in ((before, cache), (after, packed))
    ]
    np.testing.assert_allclose(*products, atol=1e-4)


def test_a_paged_cache_moves_like_a_padded_one():
    model = random_model()
    options = {"policy": {"window": 5, "decode_interval": 4}}
    padded = rerotate(model, evicted(model, "snapkv", **options))
    paged_before = evicted(model, "snapkv", policy=dict(options["policy"]), pages=4)
    paged = rerotate(model, paged_before)
    np.testing.assert_array_equal(paged.lengths, padded.lengths)
    np.testing.assert_array_equal(paged.next_position, padded.next_position)
    np.testing.assert_array_equal(paged.free_count, paged_before.free_count)
    keys = [paged.dense(jax.tree.map(lambda a, i=i: a[i], paged.views))[0] for i in range(3)]
    count = padded.capacity
    positions = np.asarray(entry_positions(paged))
    valid = positions[..., :count] >= 0
    np.testing.assert_array_equal(positions[..., :count], padded.positions)
    found = np.stack([np.asarray(k) for k in keys])[..., :count, :]
    np.testing.assert_allclose(found[valid], np.asarray(padded.keys)[valid], atol=1e-5)


def test_positions_that_do_not_fit_are_refused():
    model = random_model()
    cache = evicted(model)
    with pytest.raises(ValueError, match="shape"):
        rerotate(model, cache, cache.positions[:1])
    with pytest.raises(ValueError, match="grow"):
        rerotate(model, cache, jnp.where(cache.positions >= 0, 3, -1))
    with pytest.raises(ValueError, match="-1"):
        rerotate(model, cache, jnp.full_like(cache.positions, -1))
