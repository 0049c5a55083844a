"""Column statistics of attention against those of NumPy's weights."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch
from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.attention.blocks import block_bounds, visible_range
from kernels_pallas.column_attention import blockwise, column_attention
from tests.kernels_pallas import definitions
from tests.kernels_pallas.test_attention import case, dense, merged

SHAPES = [(2, 2, 1, 33, 70, 16), (1, 2, 3, 17, 33, 64), (2, 1, 4, 1, 129, 80), (1, 1, 8, 40, 40, 8)]


def column_sums(implementation):
    if implementation == "small blocks":
        return jax.jit(partial(blockwise.column_attention, block=16))
    return jax.jit(partial(column_attention, implementation=implementation))


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "small blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_column_sums_equal_float64_definition(shape, implementation):
    queries, keys, values, asked, places = case(shape, seed=11)
    sums = column_sums(implementation)
    for window in (NO_WINDOW, 9):
        _, lse = dense(queries, keys, values, asked, places, window)
        found = sums(queries, lse, keys, asked, places, window)
        inputs = (np.asarray(a) for a in (queries, keys, values, asked, places))
        weights = definitions.attention(*inputs, window)[2]
        np.testing.assert_allclose(found, weights.sum(axis=2), atol=1e-5)
        assert found.dtype == jnp.float32


@pytest.mark.parametrize("implementation", ["reference", "small blocks"])
def test_sums_over_two_parts_of_slots_add_up_to_the_queries_that_see_something(implementation):
    queries, keys, values, asked, places = case((2, 2, 3, 19, 50, 16), seed=12)
    halves = (slice(None, 23), slice(23, None))
    parts = [dense(queries, keys[:, :, s], values[:, :, s], asked, places[:, :, s]) for s in halves]
    _, lse = merged(*parts)
    sums = column_sums(implementation)
    parts = [sums(queries, lse, keys[:, :, s], asked, places[:, :, s]) for s in halves]
    total = sum(np.asarray(part).sum(axis=-1) for part in parts)
    spread = np.repeat(np.asarray(places), 3, axis=1)
    sees = (spread[:, :, None] >= 0) & (spread[:, :, None] <= np.asarray(asked)[:, None, :, None])
    np.testing.assert_allclose(total, sees.any(axis=-1).sum(axis=-1), atol=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_queries_with_nothing_to_see_contribute_nothing(implementation):
    queries, keys, _, asked, places = case((2, 2, 3, 9, 20, 16), seed=13)
    nobody = jnp.full((2, 6, 9), -jnp.inf)
    found = column_attention(
        queries, nobody, keys, jnp.full_like(asked, -1), places, implementation=implementation
    )
    np.testing.assert_array_equal(found, np.zeros(found.shape))


def statistics(weights, asked, places, statistic):
    """NumPy's, over the queries that see each slot."""
    group = weights.shape[1] // places.shape[1]
    found = np.zeros((*weights.shape[:2], weights.shape[3]))
    for row, head, slot in np.ndindex(found.shape):
        at = places[row, head // group, slot]
        seeing = [q for q, query in enumerate(asked[row]) if definitions.sees(query, at, 9)]
        there = weights[row, head, seeing, slot]
        if len(there):
            found[row, head, slot] = {
                "max": np.max,
                "mean": np.mean,
                "variance": lambda a: a.var(ddof=1) if len(a) > 1 else 0.0,
            }[statistic](there)
    return found


@pytest.mark.parametrize("statistic", ["max", "mean", "variance"])
@pytest.mark.parametrize("blocks", [False, True])
def test_column_statistics_equal_those_of_the_queries_that_see_the_slot(statistic, blocks):
    queries, keys, values, asked, places = case((2, 2, 3, 33, 70, 16), seed=14)
    _, lse = dense(queries, keys, values, asked, places, 9)
    sums = partial(blockwise.column_attention, block=16) if blocks else column_attention
    found = jax.jit(partial(sums, statistic=statistic))(queries, lse, keys, asked, places, 9)
    inputs = (np.asarray(a) for a in (queries, keys, values, asked, places))
    weights = definitions.attention(*inputs, 9)[2]
    expected = statistics(weights, np.asarray(asked), np.asarray(places), statistic)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_rows_one_by_one_give_what_they_give_together(monkeypatch):
    queries, keys, values, asked, places = case((3, 2, 3, 33, 70, 16), seed=16)
    _, lse = dense(queries, keys, values, asked, places)
    sums = partial(blockwise.column_attention, block=16)
    together = sums(queries, lse, keys, asked, places)
    monkeypatch.setenv(dispatch.VARIABLE, "tpu")
    by_row = sums(queries, lse, keys, asked, places)
    np.testing.assert_allclose(by_row, together, atol=1e-6)


def test_long_prompts_are_visited_in_blocks():
    queries, keys, values, asked, places = case((1, 1, 1, 33, 70, 16), seed=15)
    _, lse = dense(queries, keys, values, asked, places)
    column_attention(queries, lse, keys, asked, places)
    assert dispatch.choices()["column_attention"].implementation == "reference"
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 1, 4096, 16), (1, 1, 4096))]
    slots = jax.ShapeDtypeStruct((1, 1, 4096), jnp.int32)
    asking = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    jax.eval_shape(column_attention, *wide, wide[0], asking, slots)
    assert dispatch.choices()["column_attention"].implementation == "blockwise"


def test_blocks_visit_hardly_more_pairs_than_the_causal_half():
    for tokens in (2048, 32768):
        positions = jnp.arange(tokens)[None]
        bounds = block_bounds(positions[:, None], 256)
        ranges = jax.vmap(partial(visible_range, bounds, window=NO_WINDOW))
        first, last = ranges(positions.reshape(-1, 1, 256))
        visited = int(jnp.sum(last - first)) * 256**2
        assert visited <= 1.15 * tokens * (tokens + 1) / 2
