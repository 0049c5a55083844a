"""Window scores' kernels, simulated, against reductions of the whole attention matrix."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import lowering
from kernels_pallas.window_scores import (
    pallas_mosaic_gpu,
    pallas_mosaic_tpu,
    window_moments,
    window_scores,
)
from tests.kernels_pallas import definitions

KERNELS = ["mosaic_tpu", "mosaic_gpu"]

# (batch, KV heads, group, queries, slots, head size), dtype, reductions, sliding window
CASES = {
    "mean": ((1, 2, 4, 5, 300, 64), jnp.float32, ("mean", "mean"), 77),
    "weighted": ((2, 1, 3, 8, 257, 80), jnp.bfloat16, ("sum", None), None),
    "max": ((1, 2, 8, 3, 128, 128), jnp.bfloat16, ("max", "max"), None),
    "last_query": ((2, 1, 1, 1, 70, 128), jnp.float32, ("sum", "sum"), None),
    "many_queries": ((1, 1, 2, 70, 96, 64), jnp.bfloat16, ("mean", "max"), 50),
}


@pytest.fixture(autouse=True)
def fresh_simulators():
    yield
    pltpu.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def inputs(sizes, dtype, seed=0):
    """Slots in position order with holes, NaN in the empty ones; absent queries in row 0."""
    batch, kv_heads, group, count, slots, size = sizes
    rng = np.random.default_rng(seed)
    queries = jnp.asarray(rng.normal(size=(batch, kv_heads * group, count, size)), dtype)
    keys = jnp.asarray(rng.normal(size=(batch, kv_heads, slots, size)), dtype)
    asked = np.tile(np.arange(slots, slots + count), (batch, 1))
    asked[0, : count // 3] = -1
    positions = np.full((batch, kv_heads, slots), -1)
    for row, head in np.ndindex(batch, kv_heads):
        held = slots - 7 * head - 3 * row
        places = np.sort(rng.choice(slots, size=held, replace=False))
        positions[row, head, places] = np.sort(rng.choice(slots + count, size=held, replace=False))
    keys = jnp.where(positions[..., None] >= 0, keys, jnp.asarray(jnp.nan, dtype))
    return queries, keys, jnp.asarray(asked, jnp.int32), jnp.asarray(positions, jnp.int32)


def defined(queries, keys, asked, positions, window):
    """NumPy's weights [B, K, G, W, S]."""
    values = np.zeros(keys.shape)
    given = (np.asarray(a.astype(jnp.float32)) for a in (queries, keys))
    places = (np.asarray(a) for a in (asked, positions))
    weights = definitions.attention(*given, values, *places, window or 2**30)[2]
    return weights.reshape(*keys.shape[:2], -1, *weights.shape[2:])


def reduced(weights, asked, shares, over_queries, over_group):
    present = np.maximum((np.asarray(asked) >= 0).sum(axis=1), 1)[:, None, None, None]
    rows = {
        "mean": lambda: weights.sum(axis=3) / present,
        "max": lambda: weights.max(axis=3),
        "sum": lambda: (weights * np.asarray(shares)[:, None, None, :, None]).sum(axis=3),
    }[over_queries]()
    if over_group is None:
        return rows.reshape(rows.shape[0], -1, rows.shape[3])
    return {"mean": np.mean, "max": np.max, "sum": np.sum}[over_group](rows, axis=2)


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
@pytest.mark.parametrize("name", CASES)
def test_scores_equal_the_reduced_definition(name, implementation):
    sizes, dtype, (over_queries, over_group), window = CASES[name]
    queries, keys, asked, positions = inputs(sizes, dtype)
    shares = np.linspace(0.1, 1.0, asked.size).reshape(asked.shape)
    given = jnp.asarray(shares, jnp.float32) if over_queries == "sum" else None
    function = partial(
        window_scores,
        over_queries=over_queries,
        over_group=over_group,
        window=window,
        implementation=implementation,
    )
    found = jax.jit(function)(queries, keys, asked, positions, given)
    weights = defined(queries, keys, asked, positions, window)
    expected = reduced(weights, asked, shares, over_queries, over_group)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert found.dtype == jnp.float32


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
def test_moments_equal_the_definition(implementation):
    queries, keys, asked, positions = inputs((2, 1, 3, 6, 200, 64), jnp.float32)
    function = partial(window_moments, implementation=implementation)
    found = jax.jit(function)(queries, keys, asked, positions)
    weights = defined(queries, keys, asked, positions, None)
    for row in range(2):
        there = weights[row, :, :, np.asarray(asked[row]) >= 0]
        logs = np.log(np.where(there > 0, there, 1.0))
        expected = there.mean(axis=0), there.var(axis=0, ddof=1), -(there * logs).sum(axis=0)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one[row], other.reshape(one[row].shape), atol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", *KERNELS])
def test_the_largest_of_negative_sums_is_negative(implementation):
    queries, keys, asked, positions = inputs((1, 1, 2, 4, 70, 64), jnp.float32)
    shares = -jnp.ones(asked.shape, jnp.float32)
    found = window_scores(
        queries, keys, asked, positions, shares,
        over_queries="sum", over_group="max", implementation=implementation,
    )  # fmt: skip
    weights = defined(queries, keys, asked, positions, None)
    np.testing.assert_allclose(found, -weights.sum(axis=3).min(axis=2), atol=2e-6)


@pytest.mark.parametrize("kept", [0, 1])
def test_blocks_of_keys_come_from_vmem_or_again_from_hbm(kept):
    sizes, dtype, (over_queries, over_group), window = CASES["mean"]
    given = inputs(sizes, dtype)
    options = {"over_queries": over_queries, "over_group": over_group, "window": window}
    found = pallas_mosaic_tpu.window_scores(
        *given, **options, block=128, kept_bytes=kept * 128 * 128 * 4
    )
    expected = window_scores(*given, **options, implementation="reference")
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_program_walks_over_several_blocks_and_beyond_the_last(monkeypatch):
    monkeypatch.setattr(pallas_mosaic_gpu, "_PROGRAMS", 4)
    sizes, dtype, (over_queries, over_group), window = CASES["mean"]
    given = inputs(sizes, dtype)
    options = {"over_queries": over_queries, "over_group": over_group, "window": window}
    with lowering.interpreting(detect_races=True):
        found = window_scores(*given, **options, implementation="mosaic_gpu")
    expected = window_scores(*given, **options, implementation="reference")
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("implementation", KERNELS)
def test_no_races_equal_keys_tie_and_an_empty_head_gets_zeros(implementation):
    queries, keys, asked, positions = inputs((1, 3, 2, 4, 150, 64), jnp.bfloat16)
    keys = jnp.ones_like(keys)
    positions = positions.at[:, 1].set(-1).at[:, 2].set(jnp.arange(150)[None])
    asked = jnp.full_like(asked, 200)
    with lowering.interpreting(detect_races=True):
        found = window_scores(queries, keys, asked, positions, implementation=implementation)
    np.testing.assert_array_equal(found[:, 1], 0.0)
    np.testing.assert_array_equal(np.unique(found[:, 2]).size, 1)
    np.testing.assert_allclose(found[:, 2], 1 / 150, rtol=1e-6)


@pytest.mark.parametrize("implementation", KERNELS)
def test_kernels_decline_types_that_they_do_not_multiply(implementation):
    queries, keys, asked, positions = inputs((1, 1, 1, 2, 32, 64), jnp.float16)
    with pytest.raises(NotImplementedError, match="float16: allowed are both bfloat16 or"):
        window_scores(queries, keys, asked, positions, implementation=implementation)


def test_query_weights_go_with_sums_only():
    given = inputs((1, 1, 1, 2, 32, 64), jnp.float32)
    with pytest.raises(ValueError, match="query_weights with over_queries='mean'"):
        window_scores(*given, jnp.ones((1, 2)))
