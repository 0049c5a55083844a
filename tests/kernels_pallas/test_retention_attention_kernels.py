"""The kernels of attention under retention decay in their simulators, against the reference."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lowering
from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.retention_attention import reference, retention_attention, segment_attention
from kernels_pallas.retention_attention.segments import tokens, visible
from kernels_pallas.retention_attention.tiles import key_ranges, query_ranges

# A simulated warpgroup waits at a barrier in a thread of XLA's pool, of which there are as many
# as cores: with fewer than warpgroups and work beside them, the simulation stands still.
THREADS = 8
simulated_gpu = pytest.mark.skipif(
    os.environ.get("NPROC") != str(THREADS), reason="runs in a process with enough threads"
)


@pytest.fixture(autouse=True)
def fresh_simulators():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import tpu as pltpu

    yield
    pltpu.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def case(kv_heads, group, length, size, dtype=jnp.float32, rate=0.05):
    """One row of documents with padding inside and at the end, random tensors and decays."""
    draw = np.random.default_rng(length + size)
    shapes = [(1, kv_heads * group, length, size)] + [(1, kv_heads, length, size)] * 2
    tensors = [jnp.asarray(draw.standard_normal(shape), dtype) for shape in shapes]
    log_beta = -draw.exponential(rate, (1, kv_heads, length))
    log_beta[:, :, ::17] = -np.inf  # dead keys among live ones
    segments = np.zeros((1, length), np.int32)
    segments[0, length // 2 :] = 3
    segments[0, length // 2 + 1 : length // 2 + 4] = segments[0, -5:] = -1
    return (*tensors, jnp.asarray(log_beta, jnp.float32)), jnp.asarray(segments)


@functools.partial(jax.jit, static_argnames=("form",))
def value_and_gradients(form, tensors, segments, window):
    def probed(*tensors):
        out = form(*tensors, segments, window=window)
        probe = jnp.cos(jnp.arange(out.size, dtype=jnp.float32) * 0.7).reshape(out.shape)
        return jnp.sum(out.astype(jnp.float32) * probe), out

    gradients, out = jax.grad(probed, argnums=(0, 1, 2, 3), has_aux=True)(*tensors)
    return (out, *gradients)


def agree(kernel, tensors, segments, window=NO_WINDOW):
    """Output and gradients equal the reference's of the same numbers in float32."""
    form = functools.partial(retention_attention, implementation=kernel)
    found = value_and_gradients(form, tensors, segments, window)
    exact = tuple(array.astype(jnp.float32) for array in tensors)
    wanted = value_and_gradients(reference.retention_attention, exact, segments, window)
    for ours, theirs in zip(found, wanted, strict=True):
        # 16-bit operands round three times per product, as in blocks; ages multiply the rest.
        # Halves of float32 are off by 2^-16 of each product.
        exactly = 3e-5 if kernel == "mosaic_gpu" else 1e-5
        rounding = 0.03 if tensors[0].dtype == jnp.bfloat16 else exactly
        tolerance = rounding * float(jnp.max(jnp.abs(theirs)))
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=tolerance)


def plain_agrees(kernel, tensors, segments, window=NO_WINDOW):
    queries, keys, values, _ = tensors
    run = jax.jit(functools.partial(segment_attention, implementation=kernel))
    out, lse = run(queries, keys, values, segments, window=window)
    exact = (array.astype(jnp.float32) for array in (queries, keys, values))
    wanted, wanted_lse = reference.segment_attention(*exact, segments, window)
    exactly = 2e-5 if kernel == "mosaic_gpu" else 2e-6
    rounding = 0.02 if queries.dtype == jnp.bfloat16 else exactly
    np.testing.assert_allclose(out.astype(jnp.float32), wanted, atol=rounding)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-5)


@pytest.mark.parametrize(
    ("group", "length", "size", "dtype", "window"),
    [(3, 140, 64, jnp.float32, NO_WINDOW), (4, 520, 80, jnp.bfloat16, 200)],
)
def test_tpu_kernels_equal_the_reference_in_value_and_gradients(group, length, size, dtype, window):
    agree("mosaic_tpu", *case(1, group, length, size, dtype), window)


def test_tpu_kernel_of_plain_attention_has_no_races():
    tensors, segments = case(2, 8, 140, 128)
    with lowering.interpreting(detect_races=True):
        plain_agrees("mosaic_tpu", tensors, segments.at[0, :130].set(-1))


@simulated_gpu
@pytest.mark.parametrize(
    ("group", "length", "size", "dtype", "window"),
    [
        (3, 200, 64, jnp.bfloat16, NO_WINDOW),
        (2, 130, 128, jnp.bfloat16, 70),
        (3, 200, 64, jnp.float32, NO_WINDOW),
        (2, 130, 128, jnp.float32, 70),
    ],
)
def test_gpu_kernels_equal_the_reference_in_value_and_gradients(group, length, size, dtype, window):
    agree("mosaic_gpu", *case(1, group, length, size, dtype), window)


@simulated_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gpu_kernels_have_no_races(dtype):
    tensors, segments = case(1, 1, 300, 80, dtype)  # more blocks than stages
    with lowering.interpreting(detect_races=True):
        agree("mosaic_gpu", tensors, segments)


@simulated_gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gpu_kernel_of_plain_attention_equals_the_reference(dtype):
    tensors, segments = case(1, 2, 140, 64, dtype)
    plain_agrees("mosaic_gpu", tensors, segments.at[0, :130].set(-1))


@pytest.mark.skipif(os.environ.get("NPROC") == str(THREADS), reason="is that process")
def test_gpu_kernels_in_a_process_with_enough_threads():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "gpu", __file__]
    ran = subprocess.run(
        command, env={**os.environ, "NPROC": str(THREADS)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-8000:]


@pytest.mark.parametrize(
    ("dtype", "size", "reason"),
    [(jnp.float8_e5m2, 64, "float8_e5m2: allowed are"), (jnp.bfloat16, 256, "head size 256")],
)
def test_gpu_kernel_says_what_it_does_not_serve(dtype, size, reason):
    tensors, segments = case(1, 1, 32, size, dtype)
    with pytest.raises(NotImplementedError, match=reason):
        retention_attention(*tensors, segments, implementation="mosaic_gpu")


@pytest.mark.parametrize("window", [1, 7, 40, NO_WINDOW])
@pytest.mark.parametrize(("query_block", "key_block"), [(8, 16), (16, 8), (8, 8)])
def test_ranges_hold_every_visible_pair_and_full_ones_nothing_else(window, query_block, key_block):
    """Documents in any order, interrupted ones and padding among them."""
    draw = np.random.default_rng(window + query_block)
    segments = np.zeros((4, 96), np.int32)
    segments[1] = np.repeat(draw.integers(-1, 3, 12), 8)
    segments[2] = draw.integers(-1, 2, 96)
    segments[3, 40:] = -1
    segments = jnp.asarray(segments)
    everyone = tokens(segments)
    pairs = np.asarray(visible(everyone, everyone, window))
    split = pairs.reshape(4, 96 // query_block, query_block, 96 // key_block, key_block)
    some, every = split.any(axis=(2, 4)), split.all(axis=(2, 4))
    for find, turn in ((key_ranges, False), (query_ranges, True)):
        ranges = np.asarray(find(segments, query_block, key_block, window))
        for row, block in np.ndindex(ranges.shape[:2]):
            seen, full = ((a[row].T if turn else a[row])[block] for a in (some, every))
            first, full_first, full_last, last = ranges[row, block]
            assert 0 <= first <= full_first <= full_last <= last <= len(seen)
            assert not seen[:first].any()
            assert not seen[last:].any()
            assert full[full_first:full_last].all()


def test_one_document_needs_masks_on_the_diagonal_only():
    ranges = np.asarray(key_ranges(jnp.zeros((1, 96), jnp.int32), 8, 8, NO_WINDOW))[0]
    blocks = np.arange(12)
    np.testing.assert_array_equal(ranges, np.stack([0 * blocks, 0 * blocks, blocks, blocks + 1], 1))
    ranges = np.asarray(query_ranges(jnp.zeros((1, 96), jnp.int32), 8, 8, NO_WINDOW))[0]
    ends = np.full(12, 12)
    np.testing.assert_array_equal(ranges, np.stack([blocks, blocks + 1, ends, ends], 1))
