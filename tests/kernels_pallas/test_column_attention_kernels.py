"""Column attention's GPU kernel, simulated, against NumPy's weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lowering
from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.attention import reference as attention
from kernels_pallas.column_attention import column_attention, pallas_mosaic_gpu
from tests.kernels_pallas import definitions

# (batch, KV heads, group, queries, slots, head size), dtype, statistic, sliding window
CASES = {
    "sum": ((1, 2, 3, 130, 300, 64), jnp.float32, "sum", NO_WINDOW),
    "max_in_a_window": ((2, 1, 1, 100, 140, 80), jnp.bfloat16, "max", 33),
    "mean_in_a_window": ((2, 2, 2, 70, 90, 64), jnp.float32, "mean", 21),
    "one_tile": ((1, 1, 4, 64, 128, 128), jnp.bfloat16, "sum", NO_WINDOW),
}


@pytest.fixture(autouse=True)
def fresh_simulator():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def inputs(sizes, dtype, seed=0):
    """The last queries of a row over slots with holes; row -1 ends in padding, head 0 is empty."""
    batch, kv_heads, group, count, slots, size = sizes
    rng = np.random.default_rng(seed)
    queries = jnp.asarray(rng.normal(size=(batch, kv_heads * group, count, size)), dtype)
    keys = jnp.asarray(rng.normal(size=(batch, kv_heads, slots, size)), dtype)
    places = np.tile(np.arange(slots), (batch, kv_heads, 1))
    places[rng.random(places.shape) < 0.2] = -1
    if kv_heads > 1:
        places[:, 0] = -1
    asked = np.tile(np.arange(slots - count, slots), (batch, 1))
    asked[-1, -9:] = -1
    keys = jnp.where(places[..., None] >= 0, keys, jnp.asarray(jnp.nan, dtype))
    return queries, keys, jnp.asarray(asked, jnp.int32), jnp.asarray(places, jnp.int32)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_definition_without_races(name):
    sizes, dtype, statistic, window = CASES[name]
    queries, keys, asked, places = inputs(sizes, dtype)
    clean = jnp.where(places[..., None] >= 0, keys, jnp.zeros((), dtype))
    _, lse = attention.attention(queries, clean, clean, asked, places, window)
    with lowering.interpreting(detect_races=True):
        found = column_attention(
            queries, lse, keys, asked, places, window,
            statistic=statistic, implementation="mosaic_gpu",
        )  # fmt: skip
    given = (np.asarray(a.astype(jnp.float32)) for a in (queries, clean, clean))
    weights = definitions.attention(*given, np.asarray(asked), np.asarray(places), window)[2]
    seen = (weights > 0).sum(axis=2)
    expected = {
        "sum": weights.sum(axis=2),
        "max": weights.max(axis=2),
        "mean": weights.sum(axis=2) / np.maximum(seen, 1),
    }[statistic]
    np.testing.assert_allclose(found, expected, atol=5e-6)


def test_tiles_visited_are_hardly_more_than_the_causal_half():
    for tokens in (4096, 32768):
        positions = jnp.arange(tokens)[None]
        first, last = pallas_mosaic_gpu._tiles(positions, positions, 1, NO_WINDOW)
        visited = int(jnp.sum(last - first)) * 128 * 64
        assert visited <= 1.05 * tokens * (tokens + 1) / 2


@pytest.mark.parametrize(
    ("sizes", "statistic", "said"),
    [
        ((1, 1, 1, 8, 64, 64), "sum", "8 queries: allowed are at least 64"),
        ((1, 1, 1, 64, 64, 64), "variance", "'variance': allowed are 'sum', 'mean' and 'max'"),
        ((1, 1, 1, 64, 64, 224), "sum", "head size 224 of float32: .* up to 888"),
        ((1, 1, 1, 64, 64, 20), "sum", "head size 20 of float32: allowed are multiples"),
    ],
)
def test_the_kernel_declines_with_a_reason(sizes, statistic, said):
    queries, keys, asked, places = inputs(sizes, jnp.float32)
    lse = jnp.zeros(queries.shape[:3])
    with pytest.raises(NotImplementedError, match=said):
        column_attention(
            queries, lse, keys, asked, places, statistic=statistic, implementation="mosaic_gpu"
        )


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "mosaic_gpu"])
def test_queries_that_attended_to_nothing_contribute_nothing(implementation):
    queries, keys, asked, places = inputs((1, 1, 2, 64, 64, 64), jnp.float32)
    keys = jnp.where(places[..., None] >= 0, keys, 0.0)
    lse = attention.attention(queries, keys, keys, asked, places)[1]
    lost = lse.at[:, :, 20:].set(-jnp.inf)
    options = {"implementation": implementation}
    found = column_attention(queries, lost, keys, asked, places, **options)
    absent = asked.at[:, 20:].set(-1)
    expected = column_attention(queries, lse, keys, absent, places, **options)
    np.testing.assert_allclose(found, expected, atol=1e-6)
