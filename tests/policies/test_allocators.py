"""Splits of a budget over layers and heads."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.select import keep_mask, order_key
from kvjax.policies import Allocator, Uniform, policy
from kvjax.policies.allocators import Ada, Cake, Global, Pyramid, global_budgets
from kvjax.policies.competition import apportion, competing_budgets
from tests.policies import golden_output

count_globally = jax.jit(global_budgets)
compete = jax.jit(competing_budgets)
round_shares = jax.jit(apportion)


@partial(jax.jit, static_argnames="allocator")
def allocate(allocator: Allocator, *arguments: jax.Array) -> jax.Array:
    return allocator.allocate(*arguments)


@partial(jax.jit, static_argnames="allocator")
def head_budgets(allocator: Allocator, *arguments: jax.Array) -> jax.Array:
    return allocator.head_budgets(*arguments)


def layer_of(seed: int, layers: int, batch: int, heads: int, slots: int, ties: bool = False):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(layers, batch, heads, slots)).astype(np.float32)
    if ties:
        scores = np.round(scores)
    valid = rng.random(scores.shape) < 0.8
    valid[..., 0] = True
    rank = np.where(rng.random(scores.shape) < 0.1, rng.integers(1, 50, scores.shape), 0)
    scores = np.where(valid, scores, np.nan)  # empty slots may hold anything
    return scores, valid, rank


def integers(*values: int) -> jnp.ndarray:
    return jnp.asarray(values, jnp.int32)


def arrays(scores: np.ndarray, valid: np.ndarray, rank: np.ndarray) -> tuple:
    return jnp.asarray(scores), jnp.asarray(valid), jnp.asarray(rank, jnp.int32)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    total=st.integers(1, 120),
    floor=st.integers(0, 9),
    ceiling=st.sampled_from([3, 9, 1000]),
)
def test_global_budgets_are_the_counts_of_a_sort(
    seed: int, ties: bool, total: int, floor: int, ceiling: int
) -> None:
    scores, valid, rank = layer_of(seed, 3, 2, 2, 9, ties)
    budgets = count_globally(
        *arrays(scores, valid, rank),
        integers(total, total),
        floor=integers(floor, floor),
        ceiling=integers(ceiling, ceiling),
    )
    for row in range(2):
        one = (scores[:, row], valid[:, row], rank[:, row])
        expected = golden_output.global_counts(*one, total, floor, ceiling)
        np.testing.assert_array_equal(budgets[:, row], expected)


def test_the_entries_global_budgets_keep_are_the_best_of_the_model() -> None:
    scores, valid, rank = layer_of(3, 4, 1, 3, 50)
    rank = np.zeros_like(rank)
    budgets = allocate(
        Global(ceiling=None), *arrays(scores, valid, rank), integers(10), integers(50)
    )
    assert int(budgets.sum()) == 4 * 3 * 10
    keep = np.asarray(
        keep_mask(
            *arrays(scores, rank, valid)[:1],
            jnp.asarray(rank, jnp.int32),
            jnp.asarray(valid),
            budgets,
        )
    )
    assert scores[keep].min() >= np.where(valid & ~keep, scores, -np.inf).max()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), budget=st.integers(1, 30), floor=st.sampled_from([0.0, 0.2, 1.0])
)
def test_ada_follows_its_formula_and_spends_the_budget(
    seed: int, budget: int, floor: float
) -> None:
    scores, valid, rank = (x[0] for x in layer_of(seed, 1, 2, 4, 24))
    valid[:] = True
    scores = np.nan_to_num(scores)
    rank = np.zeros_like(rank)
    rank[..., -3:] = np.arange(1, 4)
    budget = min(budget, 24)
    budgets = np.asarray(
        head_budgets(Ada(floor=floor), *arrays(scores, valid, rank), integers(budget, budget))
    )
    assert np.all(budgets.sum(1) == 4 * budget)
    assert budgets.min() >= 1 and budgets.max() <= 24
    assert budgets.max() <= Ada(floor=floor).largest(budget, 24, 5, 4)
    if budget > 3:
        for row in range(2):
            shares = golden_output.ada_shares(scores[row], valid[row], rank[row] > 0, budget, floor)
            assert np.all(np.abs(budgets[row] - shares) < 1.0)


def test_ada_gives_heads_alike_the_same_and_normalisation_favours_concentrated_heads() -> None:
    scores = np.ones((1, 2, 16), np.float32)
    valid, rank = np.ones_like(scores, bool), np.zeros(scores.shape, int)
    even = head_budgets(Ada(floor=0.5), *arrays(scores, valid, rank), integers(4))
    assert int(even.sum()) == 8 and np.all(np.asarray(even) >= 2)
    scores = np.stack([np.r_[np.full(8, 1.0), np.zeros(8)], np.full(16, 1.01)])[None]
    scores = scores.astype(np.float32)
    plain = head_budgets(Ada(floor=0.0), *arrays(scores, valid, rank), integers(4))
    normal = head_budgets(Ada(floor=0.0, normalize=True), *arrays(scores, valid, rank), integers(4))
    assert int(plain[0, 1]) == 7  # every head keeps one entry
    assert int(normal[0, 0]) == 7


@pytest.mark.parametrize("layers", [1, 2, 7, 30])
def test_pyramid_falls_linearly_around_the_budget(layers: int) -> None:
    budget, lengths = integers(64, 128, 100, 40, 20), integers(1000, 250, 160, 60, 15)
    split = np.asarray(Pyramid().layer_budgets(budget, lengths, layers))
    np.testing.assert_array_equal(split.sum(0), layers * np.asarray(budget))
    if layers == 1:
        return
    for row in range(5):
        base, length = int(budget[row]) - min(32, int(budget[row])), int(lengths[row])
        column = split[:, row]
        if length < 2 * base or int(budget[row]) >= length:
            assert np.all(column == int(budget[row]))
            continue
        room = length - min(32, int(budget[row]))
        lowest, highest = base // 20, 2 * base - base // 20
        if highest >= room:
            highest, lowest = room, 2 * base - room
        line = np.linspace(highest, lowest, layers) + min(32, int(budget[row]))
        assert np.all(np.abs(column - line) < 1.0)
        assert np.all(np.diff(column) <= 0)
        assert column.max() <= Pyramid().largest(int(budget[row]), length, layers, 2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), total=st.integers(0, 200))
def test_apportioned_integers_are_near_the_shares_and_add_up(seed: int, total: int) -> None:
    rng = np.random.default_rng(seed)
    low, high = rng.integers(0, 5, 6), rng.integers(5, 40, 6)
    shares = rng.random(6) * 30
    result = np.asarray(
        round_shares(
            jnp.asarray(shares[None], jnp.float32),
            integers(total),
            jnp.asarray(low[None], jnp.int32),
            jnp.asarray(high[None], jnp.int32),
        )
    )[0]
    assert np.all((low <= result) & (result <= high))
    assert result.sum() == np.clip(total, low.sum(), high.sum())
    added = (result - shares)[(result > low) & (result < high)]
    assert len(added) == 0 or np.ptp(added) < 1.04  # one amount for all that are free


def test_exact_shares_are_rounded_by_largest_remainder() -> None:
    shares = np.array([3.5, 2.25, 4.75, 1.5])
    result = round_shares(
        jnp.asarray(shares[None], jnp.float32),
        integers(12),
        jnp.zeros((1, 4), jnp.int32),
        jnp.full((1, 4), 99, jnp.int32),
    )
    np.testing.assert_array_equal(result[0], golden_output.largest_remainder(shares, 12))


def test_cake_splits_by_preference_and_spreads_what_does_not_fit() -> None:
    scores, valid, rank = layer_of(5, 4, 2, 2, 40)
    valid[:] = True
    preference = np.array([[1.0, 9.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]], np.float32)
    allocator = Cake(window=4, ceiling=None)
    budgets = np.asarray(
        allocate(
            allocator,
            *arrays(scores, valid, rank),
            integers(14, 14),
            integers(40, 40),
            jnp.asarray(preference),
        )
    )
    np.testing.assert_array_equal(budgets[:, 0, 0], [8, 12, 16, 20])
    np.testing.assert_array_equal(budgets[:, 1, 0], [40, 6, 5, 5])  # 44 do not fit
    np.testing.assert_array_equal(budgets[..., 0], budgets[..., 1])
    capped = allocate(
        Cake(window=4, ceiling=2.0),
        *arrays(scores, valid, rank),
        integers(14, 14),
        integers(40, 40),
        jnp.asarray(preference),
    )
    assert int(capped.max()) == 28 and np.all(np.asarray(capped).sum((0, 2)) == 4 * 2 * 14)
    with pytest.raises(ValueError, match="preference"):
        allocator.allocate(*arrays(scores, valid, rank), integers(14, 14), integers(40, 40))


def test_competing_budgets_take_nothing_from_empty_slots() -> None:
    scores, valid, rank = layer_of(6, 1, 1, 3, 8)
    keys = order_key(
        *(
            x[0]
            for x in (
                arrays(scores, valid, rank)[0],
                jnp.asarray(rank, jnp.int32),
                jnp.asarray(valid),
            )
        )
    )
    held = valid[0].sum(-1)
    budgets = compete(
        keys, integers(1000), jnp.ones((1, 3), jnp.int32), jnp.asarray(held, jnp.int32)
    )
    np.testing.assert_array_equal(budgets, held)


ALLOCATORS = [
    Uniform(),
    Pyramid(recent=2),
    Ada(),
    Ada(normalize=True),
    Cake(window=4),
    Cake(window=4, ceiling=None),
    Global(),
    Global(floor=2),
    Global(floor=0.5, ceiling=None),
]


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=str)
@pytest.mark.parametrize("budget", [1, 3, 9, 16, 40])
def test_no_head_exceeds_what_the_allocator_announces(allocator: object, budget: int) -> None:
    scores, valid, rank = layer_of(7, 3, 2, 2, 16, ties=True)
    preference = jnp.asarray([[0.0, 5.0], [1.0, 0.0], [7.0, 0.0]], jnp.float32)
    budgets = np.asarray(
        allocate(
            allocator,
            *arrays(scores, valid, rank),
            integers(budget, budget),
            integers(16, 16),
            preference,
        )
    )
    held = valid.sum(-1)
    kept = np.minimum(budgets, held)
    assert budgets.min() >= 1
    assert kept.max() <= allocator.largest(budget, 16, 3, 2)
    assert np.all(kept.sum((0, 2)) <= 3 * 2 * budget)
    if budget == 40 and not isinstance(allocator, Pyramid):
        np.testing.assert_array_equal(kept, held)


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=str)
def test_a_row_is_split_as_if_it_were_alone(allocator: object) -> None:
    scores, valid, rank = layer_of(8, 3, 2, 2, 16)
    preference = np.array([[0.3, 5.0], [1.0, 2.0], [7.0, 0.1]], np.float32)

    def split(rows: slice) -> np.ndarray:
        return np.asarray(
            allocate(
                allocator,
                *arrays(scores[:, rows], valid[:, rows], rank[:, rows]),
                integers(5, 7)[rows],
                integers(16, 13)[rows],
                jnp.asarray(preference[:, rows]),
            )
        )

    together = split(slice(0, 2))
    for row in range(2):
        np.testing.assert_array_equal(together[:, row], split(slice(row, row + 1))[:, 0])


def test_ada_snapkv_is_the_published_composition() -> None:
    built = policy("ada-snapkv")
    assert (built.scorer.kernel, built.scorer.pooling, built.window) == (7, "max", 32)
    assert built.allocator == Ada(floor=0.2)
    assert (built.protection.sinks, built.protection.recent) == (0, 32)


def test_a_policy_gathers_what_its_allocator_needs() -> None:
    built = dataclasses.replace(policy("knorm"), allocator=Cake(window=16))
    assert built.needs == {"queries"}
    assert built.window == 16


@pytest.mark.parametrize(
    ("allocator", "options"),
    [
        (Ada, {"floor": -0.1}),
        (Global, {"floor": 1.5}),
        (Global, {"ceiling": 0.5}),
        (Cake, {"ceiling": 0.0}),
        (Cake, {"tau1": 0.0}),
        (Pyramid, {"beta": 0}),
    ],
)
def test_options_outside_what_is_allowed_are_refused(allocator: type, options: dict) -> None:
    with pytest.raises(ValueError, match="allowed"):
        allocator(**options)
