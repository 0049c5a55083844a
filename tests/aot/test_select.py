"""Selection compiles for every target, reads its rows once or from fast memory, and sorts nothing.

On TPU the keys that are counted over and over have to be in VMEM, memory space S(1), during all
passes; then HBM is read once for the arguments and written once for the result.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.gather_compact import compact
from kernels_pallas.select import competing_threshold, keep_mask, kept_indices, order_key
from kernels_pallas.select.shapes import SHAPES
from tests.aot.conftest import PLATFORM

LONGEST_OF_KERNEL = 49152


def counted_keys(text: str) -> list[str]:
    """The type of the keys in each loop that carries some."""
    loops = [line for line in text.splitlines() if " while(" in line]
    return [key for line in loops for key in re.findall(r"u32\[\d+,\d{3,}[\d,]*\]\{[^}]*\}", line)]


def arguments_of(shape: tuple[int, ...]):
    types = (jnp.float32, jnp.int32, jnp.bool_)
    return [jax.ShapeDtypeStruct(shape, dtype) for dtype in types]


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.competing])
def test_every_row_is_cut_without_a_second_copy_of_all_rows(compile_for, name):
    shape = SHAPES[name]
    rows = arguments_of((*shape.heads, shape.slots))
    compiled = compile_for(keep_mask, *rows, jax.ShapeDtypeStruct(shape.heads, jnp.int32))
    slots = rows[0].size
    assert " sort(" not in compiled.text
    assert compiled.spilled_bytes == 0
    if PLATFORM == "tpu":
        assert compiled.temporary_bytes <= 2**21
        assert all("S(1)" in key for key in counted_keys(compiled.text))
    elif shape.slots <= LONGEST_OF_KERNEL:
        assert "mosaic_gpu" in compiled.text
        # Validity and the mask as bytes, the latter padded.
        assert compiled.temporary_bytes <= 2.5 * slots + 2**16
    else:
        # The keys of one group of rows.
        assert compiled.temporary_bytes <= 9 * slots
        assert counted_keys(compiled.text)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.competing])
def test_competing_heads_are_counted_without_a_sort(compile_for, name):
    shape = SHAPES[name]
    heads = (shape.batch, shape.layers * shape.kv_heads)

    def threshold(scores, rank, valid, total, low, high):
        return competing_threshold(order_key(scores, rank, valid), total, low, high)

    bounds = [jax.ShapeDtypeStruct(heads, jnp.int32)] * 2
    total = jax.ShapeDtypeStruct(heads[:1], jnp.int32)
    rows = arguments_of((*heads, shape.slots))
    compiled = compile_for(threshold, *rows, total, *bounds)
    assert " sort(" not in compiled.text
    if PLATFORM == "tpu":
        assert compiled.temporary_bytes <= 2**21
        assert all("S(1)" in key for key in counted_keys(compiled.text))
    else:
        assert compiled.temporary_bytes <= 5.1 * rows[0].size
    assert counted_keys(compiled.text)


@pytest.mark.parametrize("slots", [129, 2049, 49152])
def test_the_gpu_kernel_serves_rows_that_are_no_multiple_of_a_block(compile_for, slots):
    if PLATFORM != "gpu":
        pytest.skip("on TPU no kernel is needed")
    rows = arguments_of((8, slots))
    compiled = compile_for(keep_mask, *rows, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert "mosaic_gpu" in compiled.text
    assert compiled.spilled_bytes == 0


def test_a_whole_cut_selects_and_moves_within_the_cache(compile_for):
    shape = SHAPES["decode, batch 16"]
    heads = jax.ShapeDtypeStruct(shape.heads, jnp.int32)
    cache = jax.ShapeDtypeStruct((*shape.heads, shape.slots, 128), jnp.bfloat16)

    def cut(keys, values, scores, rank, valid, budgets, held):
        keep = keep_mask(scores, rank, valid, budgets)
        indices, lengths = kept_indices(keep, shape.slots)
        return *compact((keys, values), indices, lengths, held=held), lengths

    rows = arguments_of((*shape.heads, shape.slots))
    compiled = compile_for(cut, cache, cache, *rows, heads, heads, donate=(0, 1))
    assert compiled.aliased_bytes >= 4 * cache.size
    assert compiled.temporary_bytes <= 0.05 * 4 * cache.size
