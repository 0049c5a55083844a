"""The pooled maximum's kernels compile for the devices, in memory linear in the lengths."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from kernels_pallas.pooled_max import pooled_max
from kernels_pallas.pooled_max.shapes import SHAPES, Shape, indexer
from tests.aot.conftest import PLATFORM

CALL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}.get(PLATFORM, "")


def compiled(compile_for, shape: Shape, near: int = 8):
    specs = {name: spec for name, spec in shape.specs().items() if spec is not None}

    def call(arrays):
        return pooled_max(
            **arrays,
            scale=shape.scale,
            activation=shape.activation,
            reduce=shape.reduce,
            near=near,
        )

    program = compile_for(call, specs)
    assert dispatch.choices()["pooled_max"].implementation == dispatch.KERNELS[PLATFORM]
    assert CALL in program.text
    assert program.spilled_bytes == 0
    return program


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_in_use_compiles_in_linear_memory(compile_for, name):
    shape = SHAPES[name]
    program = compiled(compile_for, shape)
    operands = sum(
        math.prod(spec.shape) * spec.dtype.itemsize for spec in jax.tree.leaves(shape.specs())
    )
    assert program.temporary_bytes < 1.5 * operands + 2**20


@pytest.mark.newest
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "reduce"),
    [
        (24, 8, 64, "bfloat16", "max"),
        (3, 3, 80, "bfloat16", "sum"),
        (1, 1, 16, "bfloat16", "sum"),
        (64, 1, 128, "float32", "sum"),
        (8, 8, 80, "float32", "max"),
        (6, 2, 64, "float32", "sum"),
        (2, 1, 256, "bfloat16", "max"),
    ],
)
def test_head_sizes_groups_and_odd_lengths_compile(
    compile_for, heads, kv_heads, size, dtype, reduce
):
    shape = Shape(
        batch=2,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        length=1001,
        dtype=dtype,
        reduce=reduce,
        weighted=True,
    )
    compiled(compile_for, shape)


def test_the_gradient_has_no_array_of_all_pairs(compile_for):
    """It goes through chosen pairs, which the kernel finds."""
    length = 16384
    specs = {name: spec for name, spec in indexer(1, length).specs().items() if spec is not None}
    places = {name: specs.pop(name) for name in ("query_positions", "key_positions")}

    def total(arrays, places):
        found, _ = pooled_max(**arrays, **places, activation="relu", reduce="sum", near=8)
        return jnp.sum(jnp.where(found > -jnp.inf, found, 0.0))

    program = compile_for(jax.grad(total), specs, places)
    assert CALL in program.text
    assert program.temporary_bytes < length**2 / 2
