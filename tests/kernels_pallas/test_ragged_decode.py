"""Paged attention: by pages in use, by gathering, and over the same entries without pages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.attention import NO_WINDOW, reference
from kernels_pallas.ragged_decode import paged_attention

LENGTHS = np.array([[0, 5, 16], [33, 1, 8]], np.int32)  # an empty head, full and open pages


def paged(group: int, size: int, queries: int, page: int = 8, dtype=jnp.float32):
    """Random pools whose pages lie in no order, and the same entries head by head."""
    rng = np.random.default_rng(0)
    batch, heads = LENGTHS.shape
    pages = -(-LENGTHS.max() // page) + 1
    pool = heads * pages + 2
    keys, values = (rng.normal(size=(batch, pool, page, size)) for _ in range(2))
    positions = rng.integers(0, 40, (batch, pool, page)).astype(np.int32)
    table = np.full((batch, heads, pages), -1, np.int32)
    for row in range(batch):
        free = list(rng.permutation(pool))
        for head in range(heads):
            for ordinal in range(-(-LENGTHS[row, head] // page)):
                table[row, head, ordinal] = free.pop()
    rows = np.arange(batch)[:, None, None]
    shape = (batch, heads, pages * page)
    dense = [a[rows, np.maximum(table, 0)].reshape(*shape, *a.shape[3:]) for a in (keys, values)]
    slots = positions[rows, np.maximum(table, 0)].reshape(shape)
    slots = np.where(np.arange(pages * page) < LENGTHS[..., None], slots, -1)
    query = rng.normal(size=(batch, heads * group, queries, size))
    asked = np.array([[41, 20, -1], [15, 41, 30]], np.int32)[:, :queries]
    pools = (jnp.asarray(keys, dtype), jnp.asarray(values, dtype), jnp.asarray(positions))
    arguments = (jnp.asarray(query, dtype), *pools, jnp.asarray(table), jnp.asarray(LENGTHS))
    expected = (jnp.asarray(query, dtype), *(jnp.asarray(a, dtype) for a in dense))
    return arguments, expected, jnp.asarray(asked), jnp.asarray(slots)


@pytest.mark.parametrize("implementation", ["reference", "split", None])
@pytest.mark.parametrize("window", [NO_WINDOW, 12])
@pytest.mark.parametrize(("group", "size", "queries"), [(1, 8, 1), (3, 16, 3), (8, 80, 1)])
def test_pages_do_not_change_attention(implementation, window, group, size, queries):
    arguments, expected, asked, slots = paged(group, size, queries)
    out, lse = paged_attention(*arguments, asked, window, implementation=implementation)
    wanted, wanted_lse = reference.attention(*expected, asked, slots, window)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)


def test_a_head_without_pages_gives_zero_and_no_mass():
    arguments, _, asked, _ = paged(2, 8, 1)
    out, lse = paged_attention(*arguments, asked, implementation="split")
    np.testing.assert_array_equal(out[0, :2], 0)
    np.testing.assert_array_equal(lse[0, :2], -np.inf)


def test_bfloat16_is_accumulated_in_float32():
    arguments, expected, asked, slots = paged(2, 64, 1, dtype=jnp.bfloat16)
    out, _ = paged_attention(*arguments, asked, implementation="split")
    wanted, _ = reference.attention(*expected, asked, slots)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(jnp.float32), wanted.astype(jnp.float32), atol=2e-2, rtol=2e-2
    )
