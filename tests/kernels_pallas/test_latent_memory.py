"""Writing a latent memory block by block, against the reference (itself in tests/learned)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.latent_memory import memory_update
from kernels_pallas.latent_memory.blockwise import memory_update as in_blocks

ROWS, HEADS, SLOTS, SIZE, FEATURES = 2, 3, 23, 8, 5


def written(kind: str, dtype=jnp.float32):
    """Arguments in which heads evict tokens of their own, row 1 has empty slots that hold NaN."""
    rng = np.random.default_rng(4)
    shape = (ROWS, HEADS, SLOTS)
    per_head = kind == "per head"
    own = [np.sort(rng.choice(40, SLOTS, replace=False)) for _ in range(ROWS * HEADS)]
    positions = np.stack(own).reshape(shape)
    if kind == "aligned":
        positions = np.broadcast_to(positions[:, :1], shape).copy()
    positions[1, :, 17:] = -1
    evicted = (rng.random(shape) < 0.6) & (positions >= 0)
    gone = positions[..., None] < 0
    keys, values = (np.where(gone, np.nan, rng.normal(size=(*shape, SIZE))) for _ in range(2))
    lead = (ROWS, HEADS, FEATURES, SIZE) if per_head else (ROWS, FEATURES, HEADS * SIZE)
    squares = lead[:-1] if per_head else (ROWS, FEATURES)
    arrays = (rng.normal(size=s) for s in ((HEADS, SIZE, FEATURES), lead, squares))
    state = [jnp.asarray(array, jnp.float32) for array in arrays]
    entries = [jnp.asarray(keys, dtype), jnp.asarray(values, dtype)]
    at = [jnp.asarray(positions, jnp.int32), jnp.asarray(evicted)]
    return (*state, *entries, *at, jnp.asarray([0.9, 1.0])), {"aligned": kind == "aligned"}


@pytest.mark.parametrize("kind", ["aligned", "unaligned", "per head"])
@pytest.mark.parametrize(
    ("block", "dtype", "normalise"),
    [(4, jnp.float32, True), (64, jnp.bfloat16, True), (7, jnp.float32, False)],
)
def test_blocks_add_up(kind, block, dtype, normalise):
    arguments, options = written(kind, dtype)
    options |= {"eta": 0.5, "normalise": normalise}
    wanted = memory_update(*arguments, **options, implementation="reference")
    found = jax.jit(partial(in_blocks, **options, block=block))(*arguments)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("kind", ["aligned", "per head"])
def test_blocks_have_the_references_gradient(kind):
    (weights, *arguments), options = written(kind)
    arguments = [jnp.where(jnp.isnan(a), 0, a) if a.dtype == jnp.float32 else a for a in arguments]

    def loss(weights, function, **options):
        return sum(jnp.sum(jnp.sin(a)) for a in function(weights, *arguments, **options))

    wanted = jax.grad(loss)(weights, memory_update, **options, implementation="reference")
    found = jax.grad(loss)(weights, in_blocks, **options, block=6)
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=1e-4)


def test_a_cut_that_takes_nothing_leaves_the_rest():
    (weights, values, squares, keys, v, positions, evicted, kept), _ = written("unaligned")
    nothing = jnp.zeros_like(evicted)
    arguments = (weights, values, squares, keys, v, positions, nothing, kept)
    found = memory_update(*arguments, implementation="blockwise")
    for after, before in zip(found, (values, squares), strict=True):
        factor = kept.reshape(-1, *(1,) * (before.ndim - 1))
        np.testing.assert_array_equal(after, factor * before)
