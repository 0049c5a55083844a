"""Column sums of attention against the sum of NumPy's weights."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention import NO_WINDOW
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
