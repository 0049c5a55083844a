"""Evicted entries that are merged into kept ones."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies import Remainder
from kvjax.policies.value_merging import CacheMerging, PivotMerging
from tests.policies import golden_output


@partial(jax.jit, static_argnames="remainder")
def merge(remainder: Remainder, *arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
    return remainder.apply(*arguments)


def layer_of(seed: int, dtype: object = jnp.float32):
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, 2, 2, 30, 6))
    valid = rng.random((2, 2, 30)) < 0.8
    valid[1, :, 17:] = False
    keep = valid & (rng.random(valid.shape) < 0.4)
    keep[0, 1] = False  # a head that keeps nothing
    scores = rng.random(valid.shape)
    positions = np.where(valid, np.arange(30), -1)
    clean = [np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for x in (keys, values)]
    dirty = [jnp.asarray(np.where(valid[..., None], x, np.nan), dtype) for x in clean]
    return (
        (*dirty, jnp.asarray(positions, jnp.int32), jnp.asarray(keep)),
        jnp.asarray(np.where(valid, scores, np.nan), jnp.float32),
        clean,
        valid,
        keep,
        scores,
    )


@pytest.mark.parametrize("neighbours", [1, 2, 3, 5, 32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_evicted_values_are_spread_over_the_next_kept_entries(
    neighbours: int, dtype: object
) -> None:
    inputs, given, (_, clean), valid, keep, scores = layer_of(neighbours, dtype)
    keys, values = merge(CacheMerging(neighbours=neighbours), *inputs, given)
    np.testing.assert_array_equal(*(np.asarray(x.astype(jnp.float32)) for x in (keys, inputs[0])))
    assert values.dtype == dtype
    for row, head in np.ndindex(2, 2):
        one = (row, head)
        expected = golden_output.cache_merging(
            clean[one], valid[one], keep[one], scores[one], neighbours
        )
        np.testing.assert_allclose(
            np.asarray(values[one].astype(jnp.float32))[keep[one]],
            expected[keep[one]],
            atol=1e-5 if dtype == jnp.float32 else 3e-2,
        )


def test_scores_that_are_not_positive_merge_nothing() -> None:
    inputs, given, (_, clean), _, keep, _ = layer_of(1)
    _, values = merge(CacheMerging(), *inputs, -given)
    np.testing.assert_array_equal(np.asarray(values)[keep], clean[keep].astype(np.float32))


@pytest.mark.parametrize("block", [7, 256])
def test_pivots_are_averaged_with_the_entries_most_like_them(block: int) -> None:
    inputs, given, (keys, values), valid, keep, _ = layer_of(3)
    merged = merge(PivotMerging(block=block), *inputs, given)
    for row, head in np.ndindex(2, 2):
        if not keep[row, head].any():
            continue
        one = (row, head)
        expected = golden_output.pivot_merging(keys[one], values[one], valid[one], keep[one])
        for actual, wanted in zip(merged, expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(actual[one])[keep[one]], wanted[keep[one]], atol=1e-5
            )


@pytest.mark.parametrize("remainder", [Remainder(), CacheMerging(), PivotMerging()], ids=str)
def test_when_everything_stays_nothing_changes(remainder: Remainder) -> None:
    inputs, given, (keys, values), valid, _, _ = layer_of(4)
    kept = (*inputs[:3], jnp.asarray(valid))
    for actual, usual in zip(merge(remainder, *kept, given), (keys, values), strict=True):
        np.testing.assert_allclose(np.asarray(actual)[valid], usual[valid], atol=1e-6)


def test_a_count_of_receivers_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="neighbours=0: allowed"):
        CacheMerging(neighbours=0)
