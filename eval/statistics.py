"""Means with intervals, and differences between policies on the same samples.

Scores of several policies are arrays [n, k]: one row per sample, one column per policy. Samples
that share a context have the same number in `contexts` [n]: one compressed cache decides all of
them, so that contexts are resampled, not samples. Means of n contexts drawn from the n at hand vary
less than those of n new ones; their deviations are stretched by sqrt(n / (n - 1)).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_RESAMPLES = 10_000
# Below these no interval tells a difference from chance: contexts in a group, and samples on which
# the two policies differ (a sign test of five against none has p = .06).
FEWEST_CONTEXTS = 5
FEWEST_DIFFERING = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean score and its interval; `method` names how the interval was made."""

    mean: float
    low: float
    high: float
    n: int
    contexts: int  # that the samples are about
    method: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of first - second over the samples both have, with its bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int
    enough: bool = True  # samples for a verdict

    @property
    def significant(self) -> bool:
        """The interval excludes 0, and there are enough samples for one."""
        return self.enough and (self.low > 0 or self.high < 0)

    def __neg__(self) -> Difference:
        return dataclasses.replace(self, mean=-self.mean, low=-self.high, high=-self.low)


def wilson(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion: it stays in [0, 1] and works at 0 and at n.

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z the normal quantile.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"successes={successes} of n={n}: allowed are 0 <= successes <= n, n > 0")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((centre + sign * spread) / (1 + z * z / n) for sign in (-1, 1))
    # At the ends the bound is exactly 0 or 1; rounding must not leave 1e-17 there.
    return (0.0 if successes == 0 else low), (1.0 if successes == n else high)


def bootstrap(
    values: Sequence[float], confidence: float = 0.95, resamples: int = _RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over resamples drawn with replacement, stretched.

    A single value has no width.
    """
    data = np.asarray(values, np.float64)
    if data.size == 0:
        raise ValueError("values is empty: a bootstrap needs at least one")
    means = _resampled_means(data[:, None], None, np.random.default_rng(seed), resamples)
    low, high = _interval(means, confidence)
    return float(low[0]), float(high[0])


def estimate(
    values: Sequence[float],
    confidence: float = 0.95,
    seed: int = 0,
    contexts: np.ndarray | None = None,
) -> Estimate:
    """Mean with Wilson's interval where every score is 0 or 1, else a bootstrap interval.

    Equal scores, and those of a single context, leave nothing to resample: they too have Wilson's
    interval, which for scores in [0, 1] is not too narrow, with one trial per context.
    """
    return estimates(np.asarray(values, np.float64)[:, None], confidence, seed, contexts)[0]


def estimates(
    scores: np.ndarray,
    confidence: float = 0.95,
    seed: int = 0,
    contexts: np.ndarray | None = None,
) -> list[Estimate]:
    """`estimate` of every column of `scores` [n, k]."""
    n, count = scores.shape
    trials = n if contexts is None else len(np.unique(contexts))

    def resampled(column: np.ndarray) -> bool:
        if column.min() < 0 or column.max() > 1:
            return True
        graded = trials < n or not np.isin(column, (0, 1)).all()
        return graded and trials > 1 and bool((column != column[0]).any())

    chosen = [i for i in range(count) if resampled(scores[:, i])]
    intervals: dict[int, tuple[float, float]] = {}
    if chosen:
        rng = np.random.default_rng(seed)
        means = _resampled_means(scores[:, chosen], contexts, rng, _RESAMPLES)
        ends = (side.tolist() for side in _interval(means, confidence))
        intervals = dict(zip(chosen, zip(*ends, strict=True), strict=True))
    found = []
    for i in range(count):
        mean = float(scores[:, i].mean())
        low, high = intervals.get(i) or wilson(round(mean * trials, 9), trials, confidence)
        method = "bootstrap" if i in intervals else "wilson"
        found.append(Estimate(mean=mean, low=low, high=high, n=n, contexts=trials, method=method))
    return found


def stratified_mean(
    groups: Sequence[Sequence[float]], confidence: float = 0.95, seed: int = 0
) -> Estimate:
    """Mean of the groups' means, each group with the same weight, however many scores it has.

    The interval is a bootstrap's that resamples within every group, so that it says what other
    samples of the same tasks would change, not what other tasks would.
    """
    columns = [np.asarray(group, np.float64)[:, None] for group in groups]
    return stratified_means(columns, confidence, seed)[0]


def stratified_means(
    groups: Sequence[np.ndarray],
    confidence: float = 0.95,
    seed: int = 0,
    contexts: Sequence[np.ndarray] | None = None,
) -> list[Estimate]:
    """`stratified_mean` of every column of `groups`, arrays [n of the group, k]."""
    low, high = _interval(_stratified(groups, contexts, seed), confidence)
    mean = np.mean([group.mean(0) for group in groups], axis=0)
    n, trials = sum(len(group) for group in groups), sum(_trials(groups, contexts))
    method = "stratified bootstrap"
    return [
        Estimate(mean=m, low=a, high=b, n=n, contexts=trials, method=method)
        for m, a, b in zip(mean.tolist(), low.tolist(), high.tolist(), strict=True)
    ]


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> Difference:
    """Paired bootstrap: samples are resampled, each with the scores of both policies.

    Raises:
      ValueError: the two do not have the same number of scores, or none.
    """
    if len(first) != len(second):
        raise ValueError(
            f"{len(first)} and {len(second)} scores: a paired test needs equal numbers"
        )
    scores = np.stack([np.asarray(first, np.float64), np.asarray(second, np.float64)], axis=1)
    return paired_differences([scores], confidence, seed)[0, 1]


def paired_differences(
    groups: Sequence[np.ndarray],
    confidence: float = 0.95,
    seed: int = 0,
    contexts: Sequence[np.ndarray] | None = None,
) -> dict[tuple[int, int], Difference]:
    """Of every two columns of `groups`, arrays [n of the group, k], by their numbers (i < j).

    With several groups the difference is that of `stratified_means`. `contexts` are the groups'
    own. There are enough samples where every group has `FEWEST_CONTEXTS` and the two columns
    differ in `FEWEST_DIFFERING` contexts.
    """
    resampled = _stratified(groups, contexts, seed)
    mean = np.mean([group.mean(0) for group in groups], axis=0)
    n = sum(len(group) for group in groups)
    pairs = list(itertools.combinations(range(len(mean)), 2))
    if not pairs:
        return {}
    first, second = (list(side) for side in zip(*pairs, strict=True))
    low, high = _interval(resampled[:, first] - resampled[:, second], confidence)
    large = min(_trials(groups, contexts)) >= FEWEST_CONTEXTS
    sums = [_sums(group, _own(contexts, g))[0] for g, group in enumerate(groups)]
    differing = sum((~np.isclose(s[:, first], s[:, second])).sum(0) for s in sums)
    enough = large & (np.asarray(differing) >= FEWEST_DIFFERING)
    return {
        (i, j): Difference(mean=float(mean[i] - mean[j]), low=a, high=b, n=n, enough=bool(e))
        for (i, j), a, b, e in zip(pairs, low.tolist(), high.tolist(), enough, strict=True)
    }


def _own(contexts: Sequence[np.ndarray] | None, group: int) -> np.ndarray | None:
    return None if contexts is None else contexts[group]


def _trials(groups: Sequence[np.ndarray], contexts: Sequence[np.ndarray] | None) -> list[int]:
    """Independent contexts in every group."""
    return [len(g) for g in groups] if contexts is None else [len(np.unique(c)) for c in contexts]


def _stratified(
    groups: Sequence[np.ndarray], contexts: Sequence[np.ndarray] | None, seed: int
) -> np.ndarray:
    """Mean over the groups of their resampled means, each group with draws of its own."""
    if not groups or any(len(group) == 0 for group in groups):
        raise ValueError("a group of scores is empty: a bootstrap needs at least one")
    total = sum(
        _resampled_means(
            group, _own(contexts, index), np.random.default_rng([seed, index]), _RESAMPLES
        )
        for index, group in enumerate(groups)
    )
    return np.asarray(total) / len(groups)


def _sums(scores: np.ndarray, contexts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Summed scores [c, k] and number [c] of the samples of every context."""
    if contexts is None:
        return scores, np.ones(len(scores))
    names, place = np.unique(contexts, return_inverse=True)
    sums = np.zeros((len(names), scores.shape[1]))
    np.add.at(sums, place, scores)
    return sums, np.bincount(place).astype(np.float64)


def _resampled_means(
    scores: np.ndarray, contexts: np.ndarray | None, rng: np.random.Generator, resamples: int
) -> np.ndarray:
    """Means [resamples, k] of contexts of `scores` [n, k] drawn with replacement, stretched.

    Every column sees the same draws, so that differences of columns are paired.
    """
    sums, sizes = _sums(scores, contexts)
    n, count = sums.shape
    means = np.empty((resamples, count))
    block = max(1, 2**22 // n)  # bounds memory at 32 MiB an array for any n
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        times = np.bincount(drawn.reshape(-1), minlength=size * n).reshape(size, n)
        means[start : start + size] = times @ sums / (times @ sizes)[:, None]
    mean = sums.sum(0) / sizes.sum()
    return mean + (means - mean) * math.sqrt(n / max(n - 1, 1))


def _interval(means: np.ndarray, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    tail = (1 - confidence) / 2
    # A bound that is 0 must not become significant by a rounding error.
    columns = np.ascontiguousarray(means.T)
    low, high = np.quantile(columns, [tail, 1 - tail], axis=1).round(12) + 0.0
    return low, high
