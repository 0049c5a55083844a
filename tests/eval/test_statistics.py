"""Intervals against scipy and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from eval.statistics import bootstrap, estimate, paired_difference, wilson


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 20), (7, 20), (20, 20), (431, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_agrees_with_scipy(k, n, confidence):
    expected = scipy.stats.binomtest(k, n).proportion_ci(confidence, method="wilson")
    assert wilson(k, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_refuses_more_successes_than_trials():
    with pytest.raises(ValueError, match="successes=3 of n=2"):
        wilson(3, 2)


def test_bootstrap_agrees_with_scipy():
    values = np.random.default_rng(1).beta(2, 5, size=60)
    expected = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert bootstrap(values) == pytest.approx((expected.low, expected.high), abs=0.004)


def test_bootstrap_of_equal_values_has_no_width_and_the_seed_decides():
    assert bootstrap([0.3] * 5) == pytest.approx((0.3, 0.3))
    values = np.random.default_rng(0).normal(size=9)
    assert bootstrap(values, seed=4) == bootstrap(values, seed=4) != bootstrap(values, seed=5)


def test_bootstrap_in_blocks_is_as_wide_as_theory():
    values = np.random.default_rng(0).normal(size=5000)
    low, high = bootstrap(values)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(5000), rel=0.05)


def test_estimate_takes_wilson_for_zeros_and_ones_and_bootstrap_for_grades():
    binary = estimate([1, 0, 1, 1])
    assert (binary.method, binary.mean, binary.n) == ("wilson", 0.75, 4)
    assert (binary.low, binary.high) == wilson(3, 4)
    assert estimate([0.5, 1, 0]).method == "bootstrap"


def test_paired_difference_sees_what_unpaired_intervals_would_hide():
    rng = np.random.default_rng(3)
    hard = rng.uniform(size=50)
    difference = paired_difference(hard + 0.02 + rng.normal(0, 0.01, 50), hard)
    assert difference.significant and difference.low < 0.02 < difference.high + 0.01
    first, second = estimate(hard + 0.02), estimate(hard)
    assert first.low < second.high  # the single intervals overlap


def test_a_difference_of_nothing_is_not_significant():
    same = paired_difference([1, 0, 1], [1, 0, 1])
    assert (same.mean, same.low, same.high, same.significant) == (0, 0, 0, False)
    one_of_many = paired_difference([1, 0, 0, 0, 0, 0, 0, 0], [0] * 8)
    assert not one_of_many.significant


def test_paired_difference_refuses_unequal_numbers():
    with pytest.raises(ValueError, match="2 and 1 scores"):
        paired_difference([1, 0], [1])
