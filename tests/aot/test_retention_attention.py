"""Attention under retention decay compiles for the devices, in memory linear in the length."""

from __future__ import annotations

import math

import jax
import pytest

from kernels_pallas import dispatch
from kernels_pallas.retention_attention import retention_attention, segment_attention
from kernels_pallas.retention_attention.shapes import SHAPES, Shape
from tests.aot.conftest import PLATFORM

CALL = {"tpu": "tpu_custom_call", "gpu": "mosaic_gpu"}.get(PLATFORM, "")
GRADIENTS = ["llama-8b-4k", "llama-8b-32k", "llama-8b-4k-float32", "smollm2-135m-2k"]
DIFFERENTIATED = ("queries", "keys", "values", "log_beta")


def attend(arrays):
    return retention_attention(**arrays)


def plain(arrays):
    return segment_attention(**{name: a for name, a in arrays.items() if name != "log_beta"})


def gradients(arrays):
    tensors = {name: arrays[name] for name in DIFFERENTIATED}
    rest = {name: array for name, array in arrays.items() if name not in tensors}
    out, pull = jax.vjp(lambda tensors: attend(tensors | rest), tensors)
    return pull(out)


def nbytes(*specs):
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def copies(shape: Shape) -> int:
    """Queries and keys of 128 lanes: at a TPU program's door XLA packs smaller heads otherwise."""
    if PLATFORM == "gpu" or shape.size % 128 == 0:
        return 0
    specs = Shape(**{**vars(shape), "size": 128}).specs()
    return nbytes(specs["queries"], specs["keys"])


def halves(shape: Shape, *names: str) -> int:
    """Of float32, which GPU kernels take cut into two."""
    specs = shape.specs()
    cut = PLATFORM == "gpu" and shape.dtype == "float32"
    return nbytes(*(specs[name] for name in names)) if cut else 0


def chosen(operation: str) -> None:
    choice = dispatch.choices()[operation]
    assert choice.implementation == dispatch.KERNELS[PLATFORM], choice


@pytest.mark.parametrize("name", SHAPES)
def test_forward_needs_little_beside_its_arguments(compile_for, name):
    """Log-sum-exps, decays in base 2 and ranges of blocks: less than the keys' bytes."""
    shape = SHAPES[name]
    specs = shape.specs()
    program = compile_for(attend, specs)
    chosen("retention_attention")
    cut = halves(shape, "queries", "keys", "values")
    assert program.text.count(CALL)
    assert program.spilled_bytes == 0
    assert program.temporary_bytes < nbytes(specs["keys"]) + copies(shape) + cut + 2**20


@pytest.mark.parametrize("name", ["llama-8b-32k", "smollm2-135m-2k"])
def test_plain_attention_needs_little_beside_its_arguments(compile_for, name):
    shape = SHAPES[name]
    specs = shape.specs()
    program = compile_for(plain, specs)
    chosen("segment_attention")
    assert program.text.count(CALL)
    assert program.spilled_bytes == 0
    assert program.temporary_bytes < nbytes(specs["keys"]) + copies(shape) + 2**20


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_need_linear_memory(compile_for, name):
    """The output of the forward pass is kept, and numbers per token and head."""
    shape = SHAPES[name]
    specs = shape.specs()
    program = compile_for(gradients, specs)
    chosen("retention_attention")
    cut = halves(shape, "queries", "queries", "keys", "values")  # d_out is as the queries
    assert program.text.count(CALL) >= 3
    assert program.spilled_bytes == 0
    assert program.temporary_bytes < 1.5 * nbytes(specs["queries"]) + copies(shape) + cut + 2**20


@pytest.mark.newest
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"), [(64, 3, 3), (80, 8, 1), (128, 4, 1), (128, 3, 1)]
)
def test_odd_lengths_head_and_group_sizes_compile(compile_for, size, heads, kv_heads, dtype):
    shape = Shape(batch=2, heads=heads, kv_heads=kv_heads, size=size, length=1001, dtype=dtype)
    program = compile_for(gradients, shape.specs())
    chosen("retention_attention")
    assert program.spilled_bytes == 0
