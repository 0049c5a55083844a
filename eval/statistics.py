"""Means with intervals, and differences between policies on the same samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean score and its interval; `method` names how the interval was made."""

    mean: float
    low: float
    high: float
    n: int
    method: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of first - second over the samples both have, with its bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def significant(self) -> bool:
        """The interval excludes 0."""
        return self.low > 0 or self.high < 0


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
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
    """Percentile interval of the mean over resamples drawn with replacement."""
    data = np.asarray(values, np.float64)
    if data.size == 0:
        raise ValueError("values is empty: a bootstrap needs at least one")
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    block = max(1, 2**22 // data.size)  # bounds memory at 32 MiB for any n
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        means[start : start + size] = data[rng.integers(data.size, size=(size, data.size))].mean(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def estimate(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean with Wilson's interval where every score is 0 or 1, else a bootstrap interval."""
    if all(value in (0, 1) for value in values):
        low, high = wilson(round(sum(values)), len(values), confidence)
        method = "wilson"
    else:
        low, high = bootstrap(values, confidence, seed=seed)
        method = "bootstrap"
    return Estimate(mean=float(np.mean(values)), low=low, high=high, n=len(values), method=method)


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
    differences = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    low, high = bootstrap(differences.tolist(), confidence, seed=seed)
    return Difference(mean=float(differences.mean()), low=low, high=high, n=len(first))
