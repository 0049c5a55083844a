"""Over several devices, each runs a kernel on its rows and heads; selection exchanges counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import partition

SCRIPT = Path(__file__).with_name("over_devices.py")


def test_parts_of_eight_devices_are_the_whole():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels_pallas.over_devices"],
        cwd=SCRIPT.parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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
