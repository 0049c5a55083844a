"""The identities of docs/theory.md, on random numbers."""

from __future__ import annotations

import numpy as np
import pytest


def share_on(mass, where):
    return mass[where].sum() / mass.sum()


@pytest.mark.parametrize("seed", range(5))
def test_eviction_multiplies_the_odds_of_dilution_by_one_factor(seed):
    rng = np.random.default_rng(seed)
    mass, useful = np.exp(rng.normal(0, 2, 50)), rng.random(50) < 0.2
    for kept in (rng.random(50), (rng.random(50) < 0.5).astype(float)):
        before = share_on(mass, ~useful)
        after = share_on(kept * mass, ~useful)
        rho_useful = (kept * mass)[useful].sum() / mass[useful].sum()
        rho_other = (kept * mass)[~useful].sum() / mass[~useful].sum()
        odds = rho_other / rho_useful * before / (1 - before)
        assert after / (1 - after) == pytest.approx(odds)
        assert (after < before) == (rho_useful > rho_other)


def test_dropping_distractors_alone_always_helps():
    rng = np.random.default_rng(9)
    mass, useful = np.exp(rng.normal(0, 2, 40)), np.arange(40) < 8
    dilution = [share_on(mass * (useful | (np.arange(40) < n)), ~useful) for n in range(9, 41)]
    assert all(np.diff(dilution) > 0)


def test_a_long_context_dilutes_without_bound():
    for distractors in (10, 1000, 10**6):
        low, high, useful = -1.0, 6.0, 4
        bound = distractors * np.exp(low)
        bound /= bound + useful * np.exp(high)
        logits = np.concatenate([np.full(distractors, low), np.full(useful, high)])
        mass = np.exp(logits)
        found = mass[:distractors].sum() / mass.sum()
        assert found == pytest.approx(bound)
    assert found > 0.99


def test_dilution_bounds_the_error_of_the_output():
    rng = np.random.default_rng(4)
    mass, values = np.exp(rng.normal(0, 1, 30)), rng.normal(size=(30, 8))
    useful = rng.random(30) < 0.3
    output = mass @ values / mass.sum()
    wanted = mass[useful] @ values[useful] / mass[useful].sum()
    farthest = np.linalg.norm(values[~useful] - wanted, axis=1).max()
    assert np.linalg.norm(output - wanted) <= share_on(mass, ~useful) * farthest + 1e-12
