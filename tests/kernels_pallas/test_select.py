"""Selection: the threshold, the sort and a NumPy sort of tuples keep the same slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.select import keep_mask, kept_indices, order_key
from tests.kernels_pallas import definitions

ROWS, SLOTS = 6, 24
TINY = np.finfo(np.float32).tiny  # the smallest normal number
VALUES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    TINY,
    -TINY,
    TINY / 8,
    -TINY / 8,
    3e38,
    -3e38,
    np.inf,
    -np.inf,
    np.nan,
]

by_threshold = jax.jit(lambda *inputs: keep_mask(*inputs, implementation="threshold"))
by_sort = jax.jit(lambda *inputs: keep_mask(*inputs, implementation="reference"))

places_of = jax.jit(kept_indices, static_argnames="capacity")


def check(scores, rank, valid, budgets):
    inputs = tuple(jnp.asarray(a) for a in (scores, rank, valid, budgets))
    wanted = np.stack(
        [definitions.kept(*row) for row in zip(scores, rank, valid, budgets, strict=True)]
    )
    np.testing.assert_array_equal(by_sort(*inputs), wanted)
    np.testing.assert_array_equal(by_threshold(*inputs), wanted)


@given(
    seed=st.integers(0, 10**6),
    variety=st.integers(1, len(VALUES)),
    protected=st.sampled_from([0.0, 0.2, 1.0]),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    budgets=st.lists(st.integers(0, SLOTS + 3), min_size=ROWS, max_size=ROWS),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_kept_slots_equal_a_sort_of_tuples(seed, variety, protected, empty, budgets):
    draw = np.random.default_rng(seed)
    shape = (ROWS, SLOTS)
    alphabet = draw.permutation(np.array(VALUES, np.float32))[:variety]
    scores = draw.choice(alphabet, shape)  # heavy ties
    ranks = draw.choice(np.array([1, 2, 3, 2**23 - 1], np.int32), shape)
    rank = np.where(draw.random(shape) < protected, ranks, 0).astype(np.int32)
    valid = draw.random(shape) >= empty
    check(scores, rank, valid, np.array(budgets, np.int32))


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_distinct_scores_of_any_magnitude_are_ordered_exactly(seed):
    draw = np.random.default_rng(seed)
    bits = draw.integers(0, 2**32, (ROWS, SLOTS), dtype=np.uint64).astype(np.uint32)
    scores = bits.view(np.float32)

    budgets = draw.integers(0, SLOTS + 1, ROWS).astype(np.int32)
    check(scores, np.zeros((ROWS, SLOTS), np.int32), np.ones((ROWS, SLOTS), bool), budgets)


def test_equal_scores_keep_the_lowest_slots():
    keep = keep_mask(
        jnp.zeros((1, 10)), jnp.zeros((1, 10), jnp.int32), jnp.ones((1, 10), bool), jnp.array([4])
    )
    np.testing.assert_array_equal(np.flatnonzero(keep[0]), [0, 1, 2, 3])


def test_negative_zero_ties_with_zero():
    scores = jnp.array([[-0.0, 0.0, -0.0, 0.0]])
    keys = np.asarray(order_key(scores, jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool)))
    assert len(set(keys[0].tolist())) == 1


def test_protected_slots_survive_the_largest_scores_of_others():
    scores = jnp.array([[3.4e38, 3.4e38, -3.4e38, jnp.nan]])
    rank = jnp.array([[0, 0, 1, 1]], jnp.int32)
    keep = keep_mask(scores, rank, jnp.ones((1, 4), bool), jnp.array([2]))
    np.testing.assert_array_equal(keep[0], [False, False, True, True])


def test_non_finite_scores_stay_only_when_nothing_finite_is_left():
    scores = jnp.array([[jnp.inf, -1e30, jnp.nan, -2e30, -jnp.inf]])
    none = jnp.zeros((1, 5), jnp.int32)
    every = jnp.ones((1, 5), bool)
    kept = [np.flatnonzero(keep_mask(scores, none, every, jnp.array([k]))[0]) for k in range(6)]
    assert [list(k) for k in kept] == [[], [1], [1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_bfloat16_scores_are_ranked_in_float32():
    scores = jnp.asarray([[1.0, 1.0078125, 1.0, 1.0078125]], jnp.bfloat16)
    keep = keep_mask(scores, jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool), jnp.array([3]))
    np.testing.assert_array_equal(keep[0], [True, True, False, True])


@pytest.mark.parametrize("values", [3, 10**6])
def test_rows_of_131072_slots_keep_exactly_the_budget(values):
    slots = 2**17
    draw = np.random.default_rng(values)
    scores = draw.integers(0, values, (2, slots)).astype(np.float32)
    rank = np.zeros((2, slots), np.int32)
    rank[:, :4] = 2**23 - 1
    rank[:, -64:] = np.arange(slots - 63, slots + 1)
    valid = draw.random((2, slots)) < 0.9
    valid[:, :4] = valid[:, -64:] = True
    budgets = np.array([1000, slots // 3], np.int32)
    keep = np.asarray(by_threshold(*(jnp.asarray(a) for a in (scores, rank, valid, budgets))))
    for row in range(2):
        order = np.lexsort((np.arange(slots), -scores[row], -rank[row].astype(np.int64)))
        order = order[valid[row][order]]
        wanted = np.zeros(slots, bool)
        wanted[order[: budgets[row]]] = True
        np.testing.assert_array_equal(keep[row], wanted)


@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
@settings(max_examples=15, deadline=None, derandomize=True)
@pytest.mark.parametrize("capacity", [1, 9, 30])
def test_kept_indices_ascend_and_stop_at_capacity(capacity, seed, share):
    keep = np.random.default_rng(seed).random((2, 3, SLOTS)) < share
    indices, counts = places_of(jnp.asarray(keep), capacity)
    for row in np.ndindex(2, 3):
        chosen = np.flatnonzero(keep[row])[:capacity]
        assert counts[row] == len(chosen)
        np.testing.assert_array_equal(indices[row][: len(chosen)], chosen)
        np.testing.assert_array_equal(indices[row][len(chosen) :], SLOTS)
