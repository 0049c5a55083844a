"""The pooled maximum's kernels compile for the devices, in memory linear in the lengths."""

from __future__ import annotations

import math

import jax
import pytest

from kernels_pallas import dispatch
from kernels_pallas.pooled_max import pooled_max
from kernels_pallas.pooled_max.shapes import SHAPES, Shape
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


@pytest.mark.parametrize("size", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_sizes_and_odd_lengths_compile(compile_for, size, dtype):
    for heads, kv_heads, reduce in [(24, 8, "max"), (3, 3, "sum"), (64, 1, "sum")]:
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
