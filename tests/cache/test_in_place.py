"""Compaction within the cache keeps what compaction into a new one keeps."""

from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.dispatch import VARIABLE
from kvjax.cache import padded, paged
from kvjax.policies.observation import State
from tests.cache.test_paged import assert_pages_conserved

LAYERS, BATCH, HEADS, NEW = 2, 2, 2, 3


def filled(pages: paged.Pages | None):
    """A cache of 12 slots per head, of which the heads hold 0 to 12, and three new tokens."""
    draw = np.random.default_rng(0)
    shape = {"num_layers": LAYERS, "batch": BATCH, "num_kv_heads": HEADS, "head_dim": 8}
    pool = () if pages is None else (BATCH, pages.pool, pages.size)
    state = {"mass": jnp.zeros(pool or (LAYERS, BATCH, HEADS, 12))}
    options = {"dtype": jnp.float32, "policy_state": State(slots=state)}
    if pages is None:
        empty = padded.PaddedCache.empty(capacity=12, **shape, **options)
    else:
        empty = paged.PagedCache.empty(pages=pages, **shape, **options)
    lengths = draw.integers(0, 13, (LAYERS, BATCH, HEADS)).astype(np.int32)
    lengths[0, 0] = 12, 0
    there = np.arange(12) < lengths[..., None]

    def entries(*trailing: int) -> jnp.ndarray:
        values = draw.standard_normal((LAYERS, BATCH, HEADS, 12, *trailing))
        values = np.where(there.reshape(there.shape + (1,) * len(trailing)), values, 0)
        return jnp.asarray(values, jnp.float32)

    at = np.where(there, np.arange(12) * 2, -1).astype(np.int32)
    held = {"mass": entries()}
    if pages is None:
        cache = padded.PaddedCache(
            keys=entries(8), values=entries(8), positions=jnp.asarray(at),
            lengths=jnp.asarray(lengths), next_position=jnp.full(BATCH, 24, jnp.int32),
            overflowed=empty.overflowed, policy_state=State(slots=held),
        )  # fmt: skip
    else:
        cache = empty.fill(
            entries(8), entries(8), jnp.asarray(at), jnp.asarray(lengths),
            jnp.full(BATCH, 24, jnp.int32), State(slots=held),
        )  # fmt: skip
    new = jnp.asarray(draw.standard_normal((2, LAYERS, BATCH, HEADS, NEW, 8)), jnp.float32)
    positions = np.array([[24, 25, 26], [24, -1, -1]], np.int32)
    valid = np.broadcast_to((positions >= 0)[None, :, None], (LAYERS, BATCH, HEADS, NEW))
    fresh = np.ones((LAYERS, BATCH, HEADS, NEW), np.float32)
    union = State(slots={"mass": jnp.concatenate([held["mass"], jnp.asarray(fresh)], axis=-1)})
    keep = np.concatenate([there, valid], axis=-1) & (draw.random((*there.shape[:3], 15)) < 0.7)
    keep[1, 0, 0] = np.concatenate([there, valid], axis=-1)[1, 0, 0]  # all of a head
    return cache, (jnp.asarray(keep), new[0], new[1], jnp.asarray(positions), union)


def entries_of(cache):
    """Keys, values, positions and the policy's state of all slots in use, 0 elsewhere."""
    found = []
    for layer in range(LAYERS):
        view = jax.tree.map(lambda a, layer=layer: a[layer], cache.views)
        mass = cache.dense_slots(view, jnp.int32(layer))["mass"]
        used = jnp.arange(12)[None, None] < cache.lengths[layer][..., None]
        for array in (*cache.dense(view), mass):
            mask = used.reshape(used.shape + (1,) * (array.ndim - 3))
            found.append(jnp.where(mask, array, jnp.zeros((), array.dtype)))
    return found


@pytest.mark.parametrize("kernel", ["reference", "mosaic_gpu"])
@pytest.mark.parametrize("pages", [None, paged.Pages(size=4, pool=26, per_head=3)], ids=str)
def test_moving_within_the_cache_keeps_the_same_entries(monkeypatch, pages, kernel):
    module = padded if pages is None else paged
    cache, arguments = filled(pages)
    wanted = cache.keep(*arguments)
    monkeypatch.setattr(module, "in_place", lambda *_: True)
    monkeypatch.setenv(VARIABLE, f"compact={kernel}")
    found = cache.keep(*arguments)
    if pages is None:
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)
        return
    for one, other in zip(entries_of(found), entries_of(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    for name in ("lengths", "free_count", "next_position", "overflowed"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert_pages_conserved(found)


@pytest.mark.parametrize("asked", ["gpu", "compact=reference", "portable"])
@pytest.mark.parametrize("pages", [None, paged.Pages(size=4, pool=26, per_head=3)], ids=str)
def test_what_no_kernel_moves_is_gathered_a_layer_at_a_time(monkeypatch, pages, asked):
    """Rows of 8 bfloat16 are served on GPU, of 8 bytes are not; nothing is served by override."""
    cache, (keep, keys, values, *rest) = filled(pages)
    monkeypatch.setenv(VARIABLE, asked)

    def whole(width: int) -> bool:
        """Whether a layer's worth of entries for every layer is gathered at once."""
        parts = [a[..., :width].astype(jnp.bfloat16) for a in (cache.keys, cache.values)]
        narrow = dataclasses.replace(cache, keys=parts[0], values=parts[1])
        new = (a[..., :width].astype(jnp.bfloat16) for a in (keys, values))
        moved = mock.Mock(side_effect=AssertionError)
        with mock.patch.object(padded if pages is None else paged, "compact", moved):
            try:
                jax.make_jaxpr(lambda cache, keep: cache.keep(keep, *new, *rest))(narrow, keep)
            except AssertionError:
                return True
        return False

    assert not whole(4)
    assert whole(8) == (asked == "gpu")
