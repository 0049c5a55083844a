"""Selection on accelerators: by digits, and by the simulated GPU kernel, as by a stable sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lowering
from kernels_pallas.dispatch import VARIABLE
from kernels_pallas.select import (
    competing_threshold,
    digits,
    keep_mask,
    kept_indices,
    pallas_mosaic_gpu,
)
from tests.kernels_pallas import definitions


def rows_of(slots: int, seed: int):
    """Rows of ties, of equal scores, of distinct ones, and an empty one, with their budgets."""
    draw = np.random.default_rng(seed)
    kinds = [
        draw.integers(0, 4, slots),
        np.zeros(slots),
        draw.standard_normal(slots),
        draw.standard_normal(slots).astype(jnp.bfloat16),
        draw.choice([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40], slots),
        np.ones(slots),
    ]
    scores = np.stack([np.asarray(kind, np.float32) for kind in kinds])
    rank = np.where(draw.random(scores.shape) < 0.1, draw.integers(1, 2**23, scores.shape), 0)
    rank[1] = 0
    valid = draw.random(scores.shape) < 0.9
    valid[5] = False
    budgets = np.array([slots // 3, slots // 2, 1, slots // 4, slots + 7, 3], np.int32)
    return scores, rank.astype(np.int32), valid, budgets


def wanted(scores, rank, valid, budgets):
    return np.stack(
        [definitions.kept(*row) for row in zip(scores, rank, valid, budgets, strict=True)]
    )


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("slots", [1, 37, 256])
def test_digits_keep_what_a_sort_keeps(monkeypatch, platform, slots):
    monkeypatch.setenv(VARIABLE, platform)  # digits of 1 bit, or of 3
    inputs = rows_of(slots, seed=slots)
    for budgets in (inputs[3], np.zeros(6, np.int32)):
        rows = (*inputs[:3], budgets)
        found = keep_mask(*(jnp.asarray(a) for a in rows), implementation="digits")
        np.testing.assert_array_equal(found, wanted(*rows))


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_digits_keep_what_a_sort_keeps_of_131072_slots_in_groups_of_rows(monkeypatch, platform):
    monkeypatch.setenv(VARIABLE, platform)
    monkeypatch.setattr(digits, "_CACHED", 2 * 2**17)
    inputs = tuple(jnp.asarray(a) for a in rows_of(2**17, seed=1))
    found = jax.jit(digits.keep_mask)(*inputs)
    expected = jax.jit(lambda *a: keep_mask(*a, implementation="reference"))(*inputs)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_threshold_of_competing_heads_is_the_same_by_digits(monkeypatch, platform):
    monkeypatch.setenv(VARIABLE, platform)
    draw = np.random.default_rng(2)
    keys = jnp.asarray(draw.integers(0, 2**32, (4, 6, 50), dtype=np.uint64).astype(np.uint32))
    keys = keys.at[1].set(jnp.uint32(7)).at[2].set(keys[2] >> 28)
    total = jnp.array([60, 40, 100, 1000])
    low = jnp.asarray(draw.integers(0, 5, (4, 6)), jnp.int32)
    high = low + jnp.asarray(draw.integers(0, 45, (4, 6)), jnp.int32)
    found = competing_threshold(keys, total, low, high, implementation="digits")

    def count(row: int, least: int) -> int:
        counts = (np.asarray(keys)[row] >= least).sum(-1)
        return int(np.clip(counts, low[row], high[row]).sum())

    for row, threshold in enumerate(np.asarray(found).tolist()):
        assert threshold == 0 or count(row, threshold) >= int(total[row])
        assert threshold == 2**32 - 1 or count(row, threshold + 1) < int(total[row])
    other = competing_threshold(keys, total, low, high, implementation="threshold")
    np.testing.assert_array_equal(found, other)


@pytest.mark.parametrize("capacity", [1, 9, 30])
def test_places_of_kept_slots_are_the_same_by_sort(monkeypatch, capacity):
    keep = np.random.default_rng(3).random((2, 3, 24)) < np.array([0.0, 0.5, 1.0])[:, None]
    expected = kept_indices(jnp.asarray(keep), capacity)
    monkeypatch.setenv(VARIABLE, "tpu")
    found = kept_indices(jnp.asarray(keep), capacity)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


def test_the_gpu_kernel_keeps_what_a_sort_keeps():
    inputs = rows_of(150, seed=3)
    found = keep_mask(*(jnp.asarray(a) for a in inputs), implementation="mosaic_gpu")
    np.testing.assert_array_equal(found, wanted(*inputs))


def test_warpgroups_that_share_a_row_do_not_race(monkeypatch):
    monkeypatch.setattr(pallas_mosaic_gpu, "_SHORT", 128)
    # The simulator needs a core for each.
    monkeypatch.setattr(pallas_mosaic_gpu, "_GROUPS", 2)
    inputs = tuple(a[:2] for a in rows_of(300, seed=4))
    with lowering.interpreting(detect_races=True):
        found = keep_mask(*(jnp.asarray(a) for a in inputs), implementation="mosaic_gpu")
    np.testing.assert_array_equal(found, wanted(*inputs))


def test_rows_that_do_not_fit_in_shared_memory_are_declined():
    inputs = tuple(jnp.asarray(a) for a in rows_of(49153, seed=5))
    with pytest.raises(NotImplementedError, match="rows of 49153 slots: allowed are 128"):
        keep_mask(*inputs, implementation="mosaic_gpu")
