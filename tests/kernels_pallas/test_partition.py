"""Over several devices, each runs a kernel on its rows and heads; selection exchanges counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import partition
from tests.program import output_of


def test_parts_of_eight_devices_are_the_whole():
    output_of("tests.kernels_pallas.over_devices")


def test_a_program_of_one_device_is_not_split():
    @partition.partitioned("B K S, B K S -> B K S")
    def twice(keys, more=None):
        return keys * 2 if more is None else keys * 2 + more

    keys = jnp.arange(6.0).reshape(1, 2, 3)
    np.testing.assert_array_equal(jax.jit(twice)(keys), keys * 2)
    np.testing.assert_array_equal(jax.jit(twice)(keys, keys), keys * 3)
    assert "shard_map" not in str(jax.make_jaxpr(twice)(keys))


def test_leading_axes_are_the_last_of_layers_rows_and_heads():
    assert [partition.leading(n) for n in (1, 2, 3)] == ["K", "B K", "L B K"]
