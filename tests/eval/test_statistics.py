"""Intervals against scipy and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from eval.statistics import (
    bootstrap,
    estimate,
    estimates,
    paired_difference,
    paired_differences,
    stratified_mean,
    wilson,
)


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


def test_a_mean_of_groups_weighs_every_group_alike_however_large():
    found = stratified_mean([[1.0] * 90, [0.0] * 10])
    assert (found.mean, found.n, found.method) == (0.5, 100, "stratified bootstrap")
    # Within a group all scores are equal: no other sample of it would change the mean.
    assert (found.low, found.high) == (0.5, 0.5)


def test_a_stratified_interval_resamples_within_groups_and_each_on_its_own():
    rng = np.random.default_rng(5)
    groups = [rng.beta(2, 3, size=n) + shift for n, shift in ((30, 0), (12, 5), (50, 10))]
    draws = np.random.default_rng(11)

    def resampled(group):
        mean = draws.choice(group, len(group)).mean()
        return group.mean() + (mean - group.mean()) * np.sqrt(len(group) / (len(group) - 1))

    means = [np.mean([resampled(group) for group in groups]) for _ in range(20_000)]
    found = stratified_mean([group.tolist() for group in groups])
    assert found.mean == pytest.approx(np.mean([group.mean() for group in groups]))
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.004)
    # Two equal groups average out; draws in common would leave the width of one.
    one = groups[0].tolist()
    width = [
        found.high - found.low for found in (stratified_mean([one]), stratified_mean([one] * 2))
    ]
    assert width[1] == pytest.approx(width[0] / np.sqrt(2), rel=0.05)


def test_paired_differences_of_many_policies_are_those_of_each_two():
    scores = np.random.default_rng(7).integers(0, 4, size=(40, 4)) / 3
    found = paired_differences([scores])
    assert set(found) == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    for (i, j), difference in found.items():
        alone = paired_difference(scores[:, i].tolist(), scores[:, j].tolist())
        assert difference == alone
        assert -difference == paired_difference(scores[:, j].tolist(), scores[:, i].tolist())
        resampled = bootstrap((scores[:, i] - scores[:, j]).tolist())
        assert (difference.low, difference.high) == pytest.approx(resampled, abs=0.02)


def test_a_paired_difference_of_groups_is_stratified():
    rng = np.random.default_rng(8)
    groups = [rng.uniform(size=(n, 2)) for n in (20, 60)]
    draws = np.random.default_rng(9)

    def resample():
        means = []
        for group in groups:
            chosen = group[draws.integers(len(group), size=len(group))]
            means.append((chosen[:, 0] - chosen[:, 1]).mean())
        return np.mean(means)

    expected = np.quantile([resample() for _ in range(20_000)], [0.025, 0.975])
    found = paired_differences(groups)[0, 1]
    assert (found.low, found.high) == pytest.approx(expected, abs=0.01)
    assert found.n == 80


def test_rounding_makes_no_difference_significant():
    thirds = [1 / 3, 2 / 3, 1 / 3 + 1 / 3 + 1 / 3]
    other = [0.1 + 0.2 + 1 / 30, 2 / 3, 1.0]
    assert not paired_difference(thirds, other).significant


def test_estimates_of_columns_are_estimates_of_each():
    scores = np.stack([[0, 1, 1, 0.5], [0, 1, 1, 1], [0.25, 0.5, 1, 0]], axis=1)
    assert estimates(scores) == [estimate(column.tolist()) for column in scores.T]


def test_equal_scores_and_a_single_one_have_the_interval_of_a_proportion():
    assert (estimate([0.5] * 4).low, estimate([0.5] * 4).high) == wilson(2, 4)
    assert (estimate([0.25]).low, estimate([0.25]).high) == wilson(0.25, 1)


@pytest.mark.parametrize("tasks", [1, 13])
@pytest.mark.parametrize("samples", [5, 10])
def test_policies_that_are_alike_are_rarely_called_different(tasks, samples):
    """At 5 % nominally; a bootstrap of few samples is narrower than it claims."""
    rng = np.random.default_rng([tasks, samples])
    found = 0
    for _ in range(60):
        groups = [rng.integers(0, 2, size=(samples, 2)).astype(float) for _ in range(tasks)]
        found += paired_differences(groups)[0, 1].significant
    assert found <= 0.15 * 60


def test_there_is_no_verdict_on_few_samples_or_few_that_differ():
    assert not paired_difference([1.0] * 4, [0.0] * 4).significant
    five = paired_difference([1.0] * 5 + [0.0] * 95, [0.0] * 100)
    assert five.low > 0 and not five.significant  # one sample in 32 such runs of chance alone
    assert paired_difference([1.0] * 12 + [0.0] * 88, [0.0] * 100).significant
    few = paired_differences([np.array([[1.0, 0.0]] * 2)] * 13)[0, 1]
    assert few.low > 0 and not few.significant


def test_samples_of_one_context_are_resampled_together():
    rng = np.random.default_rng(3)
    contexts = np.repeat(np.arange(20), 5)
    shared = rng.integers(0, 2, 20).astype(float)
    scores = shared[contexts]  # the context decides: as much is known as from 20 samples
    found, alone = estimate(scores, contexts=contexts), estimate(shared)
    assert (found.n, found.contexts, found.method) == (100, 20, "bootstrap")
    assert found.mean == alone.mean
    assert found.high - found.low == pytest.approx(alone.high - alone.low, rel=0.1)
    assert found.high - found.low > 1.8 * (estimate(scores).high - estimate(scores).low)
    # Contexts of unequal sizes: the mean is that of the samples.
    uneven = np.array([0, 0, 0, 1, 2, 3, 4, 5])
    values = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.5, 0.25])
    draws = np.random.default_rng(4)
    means = []
    for _ in range(20_000):
        rows = np.concatenate([np.flatnonzero(uneven == c) for c in draws.integers(6, size=6)])
        means.append(values[rows].mean())
    low, high = np.quantile(
        values.mean() + (np.array(means) - values.mean()) * np.sqrt(6 / 5), [0.025, 0.975]
    )
    ours = estimate(values, contexts=uneven)
    assert ours.mean == pytest.approx(values.mean())
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=0.02)


def test_contexts_of_one_sample_each_change_nothing():
    scores = np.random.default_rng(2).uniform(size=(30, 3))
    numbers = np.arange(30)
    assert estimates(scores, contexts=numbers) == estimates(scores)
    assert paired_differences([scores], contexts=[numbers]) == paired_differences([scores])


def test_empty_groups_are_refused():
    with pytest.raises(ValueError, match="empty"):
        stratified_mean([[1.0], []])
    with pytest.raises(ValueError, match="empty"):
        bootstrap([])
