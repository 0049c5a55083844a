"""Gathering kept slots to the front."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.gather_compact import gather_slots
from kernels_pallas.select import kept_indices


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("trailing", [(), (5,), (3, 2)])
def test_slots_are_taken_by_index_and_the_rest_is_filled(dtype, trailing):
    draw = np.random.default_rng(0)
    array = jnp.asarray(draw.integers(-50, 50, (2, 3, 11, *trailing)), dtype)
    indices = draw.integers(0, 14, (2, 3, 7)).astype(np.int32)
    found = gather_slots(array, jnp.asarray(indices), fill=-1)
    assert found.dtype == dtype
    for place in np.ndindex(2, 3, 7):
        slot = indices[place]
        wanted = np.asarray(array)[place[:2]][slot] if slot < 11 else np.full(trailing, -1)
        np.testing.assert_array_equal(np.asarray(found)[place], wanted)


def test_compaction_moves_kept_entries_to_the_front_in_order():
    draw = np.random.default_rng(1)
    keep = draw.random((2, 2, 40)) < 0.4
    array = draw.standard_normal((2, 2, 40, 8)).astype(np.float32)
    indices, counts = kept_indices(jnp.asarray(keep), 32)
    found = np.asarray(gather_slots(jnp.asarray(array), indices))
    for head in np.ndindex(2, 2):
        count = int(counts[head])
        np.testing.assert_array_equal(found[head][:count], array[head][keep[head]])
        np.testing.assert_array_equal(found[head][count:], 0)


def test_poison_in_slots_that_are_not_kept_never_reaches_the_result():
    array = jnp.full((1, 1, 6, 4), jnp.nan).at[0, 0, 2].set(1.0)
    indices, _ = kept_indices(jnp.array([[[False, False, True, False, False, False]]]), 3)
    found = gather_slots(array, indices)
    np.testing.assert_array_equal(found[0, 0], [[1] * 4, [0] * 4, [0] * 4])
