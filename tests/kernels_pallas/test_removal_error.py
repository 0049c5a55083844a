"""Removal errors: blocks and the kernels, simulated, against a softmax without the entry."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import lowering
from kernels_pallas.removal_error import (
    mosaic_gpu_outputs,
    pallas_mosaic_tpu,
    reference,
    removal_error,
    restkv_scores,
)
from kernels_pallas.window_scores import window_scores

IMPLEMENTATIONS = ["reference", "blockwise", "mosaic_tpu", "mosaic_gpu"]

# (batch, KV heads, group, slots, head size), dtype, joint, tau, columns of the factor
CASES = {
    "joint": ((1, 2, 4, 300, 64), jnp.float32, True, 1.0, 256),
    "apart": ((2, 1, 3, 257, 80), jnp.bfloat16, False, 0.5, 80),
    "narrow_model": ((1, 2, 3, 96, 64), jnp.bfloat16, True, 2.0, 100),
    "no_factor": ((1, 1, 1, 130, 128), jnp.float32, True, 1.0, None),
}


@pytest.fixture(autouse=True)
def fresh_simulators():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    yield
    pltpu.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def inputs(sizes, dtype, joint, columns, seed=0):
    """Weights that sum to 1 over the slots, NaN values in the empty ones."""
    batch, kv_heads, groups, slots, size = sizes
    rng = np.random.default_rng(seed)
    positions = np.tile(np.arange(slots), (batch, kv_heads, 1))
    positions[rng.random(positions.shape) < 0.2] = -1
    weights = rng.random((batch, kv_heads, groups, slots)) ** 8 * (positions >= 0)[:, :, None]
    weights /= weights.sum(axis=-1, keepdims=True)
    values = rng.normal(size=(batch, kv_heads, slots, size))
    values[positions < 0] = np.nan
    factor = None
    if columns is not None:
        rows = (kv_heads, groups * size) if joint else (kv_heads * groups, size)
        factor = rng.normal(size=(*rows, columns)) / np.sqrt(size)
        factor = jnp.asarray(np.tril(factor), jnp.float32)
    before = jnp.asarray([slots - 20 - row for row in range(batch)], jnp.int32)
    return (
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(values, dtype),
        jnp.asarray(positions, jnp.int32),
        before,
        factor,
    )


def defined(weights, values, positions, before, factor, *, joint, tau):
    """One slot at a time in NumPy's float64."""
    weights, values = np.asarray(weights, np.float64), np.asarray(values.astype(jnp.float32), float)
    batch, kv_heads, groups, slots = weights.shape
    size = values.shape[3]
    found = np.zeros((batch, kv_heads, groups, slots))
    for row, head in np.ndindex(batch, kv_heads):
        places = np.asarray(positions[row, head])
        clean = np.where(places[:, None] >= 0, values[row, head], 0.0)
        summed = (places >= 0) & (places < int(before[row]))
        share = weights[row, head] / np.maximum(1 - weights[row, head], 1e-6)
        outputs = (weights[row, head] * summed) @ clean
        change = outputs[:, None] - clean[None]
        if joint:
            stacked = (change * share[..., None]).swapaxes(0, 1).reshape(slots, groups * size)
            stacked = stacked if factor is None else stacked @ np.asarray(factor[head], float)
            norm, scale = np.linalg.norm(stacked, axis=1), share.sum(axis=0)
            safe = np.where(scale > 0, scale, 1.0)
            found[row, head, 0] = scale * (norm / safe) ** tau
        else:
            for g in range(groups):
                own = change[g]
                if factor is not None:
                    own = own @ np.asarray(factor[head * groups + g], float)
                found[row, head, g] = share[g] * np.linalg.norm(own, axis=1) ** tau
    return found[:, :, 0] if joint else found.reshape(batch, -1, slots)


def all_but_what_is_declined():
    pairs = [(name, implementation) for name in CASES for implementation in IMPLEMENTATIONS]
    return [pair for pair in pairs if pair != ("no_factor", "mosaic_gpu")]


@pytest.mark.parametrize(("name", "implementation"), all_but_what_is_declined())
def test_errors_equal_the_definition(name, implementation):
    sizes, dtype, joint, tau, columns = CASES[name]
    given = inputs(sizes, dtype, joint, columns)
    function = partial(removal_error, joint=joint, tau=tau, implementation=implementation)
    found = jax.jit(function)(*given)
    expected = defined(*given, joint=joint, tau=tau)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [0, 1])
def test_blocks_of_values_come_from_vmem_or_again_from_hbm_without_races(kept):
    sizes, dtype, joint, tau, columns = CASES["joint"]
    given = inputs(sizes, dtype, joint, columns)
    with lowering.interpreting(detect_races=True):
        found = pallas_mosaic_tpu.removal_error(
            *given, joint=joint, tau=tau, block=128, kept_bytes=kept * 128 * 64 * 4
        )
    expected = defined(*given, joint=joint, tau=tau)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "dtype", "joint", "tau"),
    [
        ((1, 1, 3, 600, 16), jnp.float32, True, 0.5),  # several blocks of slots
        ((1, 1, 8, 257, 64), jnp.bfloat16, True, 1.0),  # more tiles than are held at once
        ((1, 1, 2, 96, 128), jnp.float32, False, 1.0),  # tiles in two pieces
        ((2, 2, 1, 40, 80), jnp.bfloat16, True, 1.0),
    ],
)
def test_the_gpu_kernels_have_no_races(sizes, dtype, joint, tau, monkeypatch, capfd):
    monkeypatch.setattr(mosaic_gpu_outputs, "_PROGRAMS", 1)  # all blocks in one program
    given = inputs(sizes, dtype, joint, sizes[2] * sizes[4] if joint else sizes[4])
    with lowering.interpreting(detect_races=True):
        found = removal_error(*given, joint=joint, tau=tau, implementation="mosaic_gpu")
    expected = defined(*given, joint=joint, tau=tau)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("sizes", "dtype", "columns", "said"),
    [
        ((1, 1, 1, 8, 64), jnp.float32, None, "no factor: allowed is one"),
        ((1, 1, 1, 8, 64), jnp.float16, 64, "float16: allowed are bfloat16 and float32"),
        ((1, 1, 1, 8, 72), jnp.float32, 72, "head size 72: allowed are multiples of 16 up to 128"),
        ((1, 1, 17, 8, 16), jnp.float32, 272, "17 query heads per KV head: allowed are up to 16"),
    ],
)
def test_the_gpu_kernel_declines_with_a_reason(sizes, dtype, columns, said):
    given = inputs(sizes, dtype, True, columns)
    with pytest.raises(NotImplementedError, match=said):
        removal_error(*given, joint=True, implementation="mosaic_gpu")


def test_restkv_scores_are_the_errors_of_the_averaged_attention():
    sizes, dtype, joint, tau, columns = CASES["joint"]
    _, values, positions, before, factor = inputs(sizes, dtype, joint, columns)
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.normal(size=(1, 8, 5, 64)), dtype)
    keys = jnp.asarray(rng.normal(size=(1, 2, 300, 64)), dtype)
    asked = jnp.arange(295, 300, dtype=jnp.int32)[None]
    share = jnp.asarray([[0.1, 0.1, 0.2, 0.2, 0.4]], jnp.float32)
    given = (queries, keys, values, asked, positions, share, before, factor)
    found = restkv_scores(*given, joint=joint, tau=tau)
    weights = window_scores(
        queries, keys, asked, positions, share, over_queries="sum", over_group=None
    )
    expected = defined(
        weights.reshape(1, 2, 4, 300), values, positions, before, factor, joint=joint, tau=tau
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
    again = reference.restkv_scores(*given, joint=joint, tau=tau)
    np.testing.assert_allclose(again, expected, rtol=2e-5, atol=1e-6)


def test_a_factor_of_another_size_is_refused():
    given = inputs((1, 2, 4, 64, 16), jnp.float32, True, 64)
    with pytest.raises(ValueError, match=r"factor has shape \(2, 64, 64\): allowed with joint=F"):
        removal_error(*given, joint=False)
