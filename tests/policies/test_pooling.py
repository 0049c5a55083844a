from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies.pooling import pool
from tests.policies.golden import pooled


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 5, 21])
@pytest.mark.parametrize("slots", [1, 4, 30])
def test_pooling_matches_a_loop(slots: int, kernel: int, kind: str) -> None:
    x = np.random.default_rng(slots).normal(size=(2, 3, slots))
    expected = np.apply_along_axis(pooled, -1, x, kernel, kind)
    actual = pool(jnp.asarray(x, dtype=jnp.float32), kernel, kind)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_average_counts_the_zeros_beyond_the_ends() -> None:
    np.testing.assert_allclose(pool(jnp.ones(5), 5, "avg"), [0.6, 0.8, 1.0, 0.8, 0.6], rtol=1e-6)


def test_invalid_slots_give_nothing_to_their_neighbours() -> None:
    x = jnp.asarray([-2.0, 100.0, -3.0, -4.0])
    valid = jnp.asarray([True, False, True, True])
    np.testing.assert_allclose(pool(x, 3, "max", valid)[jnp.asarray([0, 2, 3])], [-2, -3, -3])
    np.testing.assert_allclose(pool(x, 3, "avg", valid)[2], -7 / 3, rtol=1e-6)


@pytest.mark.parametrize("kernel", [0, 2, -3])
def test_kernels_without_a_centre_are_refused(kernel: int) -> None:
    with pytest.raises(ValueError, match=f"kernel={kernel}: allowed are odd"):
        pool(jnp.ones(4), kernel)
