"""Soft cache occupancy: values and gradients against NumPy in float64."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.occupancy import blockwise, occupancy, occupancy_at, reference
from kernels_pallas.retention_attention.segments import tokens, visible, visible_ranges

dense = jax.jit(reference.occupancy)
in_blocks = jax.jit(partial(blockwise.occupancy, block=16))
FORMS = [dense, in_blocks]
dense_at = jax.jit(reference.occupancy_at)
in_blocks_at = jax.jit(partial(blockwise.occupancy_at, block=16))
SAMPLED = [dense_at, in_blocks_at]

# Packed documents, one of them a single token, padding at the end; and a row of one document.
PACKED = [[0] * 14 + [1] * 19 + [2] + [3] * 8 + [-1] * 3, [5] * 45]


def definition(log_beta, segments):
    """S(t) = sum over i <= t in t's segment of exp((t - i) log_beta_i)."""
    log_beta = np.asarray(log_beta, np.float64)
    found = np.zeros(log_beta.shape)
    for row, head, t in np.ndindex(log_beta.shape):
        for i in range(t + 1):
            if segments[row][t] == segments[row][i] >= 0:
                found[row, head, t] += np.exp((t - i) * log_beta[row, head, i])
    return found


def slopes(log_beta, segments, weights):
    """d log_beta_i = sum over t >= i of weight_t (t - i) exp((t - i) log_beta_i)."""
    log_beta = np.asarray(log_beta, np.float64)
    found = np.zeros(log_beta.shape)
    for row, head, i in np.ndindex(log_beta.shape):
        for t in range(i, log_beta.shape[2]):
            if segments[row][t] == segments[row][i] >= 0:
                age = t - i
                found[row, head, i] += (
                    weights[row, head, t] * age * np.exp(age * log_beta[row, head, i])
                )
    return found


def case(batch, heads, length, seed=0, rate=0.2):
    draw = np.random.default_rng(seed)
    return jnp.asarray(-draw.exponential(rate, (batch, heads, length)), jnp.float32)


def rows(segments):
    return jnp.asarray(np.atleast_2d(segments), jnp.int32)


def probe(shape):
    """Fixed weights that make a scalar of an output, different everywhere."""
    return np.cos(np.arange(np.prod(shape)) * 0.7).reshape(shape)


@cache
def value_and_gradient(form):
    """Jitted result, and the gradient of its probed sum in log_beta."""

    @jax.jit
    def both(log_beta, *rest):
        found, pull = jax.vjp(lambda log_beta: form(log_beta, *rest), log_beta)
        return found, pull(jnp.asarray(probe(found.shape), jnp.float32))[0]

    return both


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_values_and_gradient_equal_the_formulas(form):
    log_beta = case(2, 3, 45)
    found, gradient = value_and_gradient(form)(log_beta, rows(PACKED))
    assert found.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(found, definition(log_beta, PACKED), rtol=1e-6, atol=1e-6)
    wanted = slopes(log_beta, PACKED, probe(found.shape))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_gradient_equals_finite_differences_of_the_definition(form):
    """Central differences in float64; their own error is about 1e-9."""
    segments = [[0] * 7 + [1] * 3 + [-1]]
    log_beta = case(1, 2, 11, seed=1)
    _, gradient = value_and_gradient(form)(log_beta, rows(segments))
    exact = np.asarray(log_beta, np.float64)
    weights = probe(exact.shape)
    wanted = np.zeros(exact.shape)
    for place in np.ndindex(exact.shape):
        ends = []
        for step in (1e-5, -1e-5):
            exact[place] += step
            ends.append(np.sum(definition(exact, segments) * weights))
            exact[place] -= step
        wanted[place] = (ends[0] - ends[1]) / 2e-5
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 100])
def test_rows_of_any_length_equal_the_reference(length):
    """Shorter than a block, one block, one token over, several blocks."""
    log_beta = case(2, 2, length, seed=2, rate=0.03)
    segments = np.zeros((2, length), int)
    segments[1, length // 2 :] = 1
    found, gradient = value_and_gradient(in_blocks)(log_beta, rows(segments))
    wanted, wanted_gradient = value_and_gradient(dense)(log_beta, rows(segments))
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_segments_and_samples_may_lie_in_any_order(seed, data):
    """Also documents that are interrupted, padding anywhere, samples that repeat or are absent."""
    runs = data.draw(st.lists(st.integers(-1, 3), min_size=2, max_size=9))
    segments = np.resize(np.repeat(runs, 41 // len(runs) + 1), (1, 41))
    log_beta = case(1, 2, 41, seed)
    at = np.random.default_rng(seed).integers(-1, 41, (1, 23))
    wanted = definition(log_beta, segments)
    found, gradient = value_and_gradient(in_blocks)(log_beta, rows(segments))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        gradient, slopes(log_beta, segments, probe(wanted.shape)), rtol=1e-5, atol=1e-5
    )
    picked, gradient = value_and_gradient(in_blocks_at)(log_beta, rows(segments), rows(at))
    np.testing.assert_allclose(
        picked, np.where(at[:, None] < 0, 0, wanted[:, :, at[0]]), rtol=1e-6, atol=1e-6
    )
    spread = np.zeros(wanted.shape)
    for sample, index in enumerate(at[0]):
        if index >= 0:
            spread[:, :, index] += probe(picked.shape)[:, :, sample]
    np.testing.assert_allclose(gradient, slopes(log_beta, segments, spread), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", SAMPLED, ids=["reference", "blockwise"])
@pytest.mark.parametrize("count", [1, 16, 21])
def test_samples_are_the_whole_at_their_indices(form, count):
    log_beta = case(2, 3, 45, seed=3)
    at = np.random.default_rng(3).integers(0, 45, (2, count))
    found = form(log_beta, rows(PACKED), rows(at))
    whole = definition(log_beta, PACKED)
    np.testing.assert_allclose(
        found, np.take_along_axis(whole, at[:, None], axis=2), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("implementation", ["reference", "blockwise", None])
def test_constant_retention_is_the_geometric_sum(implementation):
    """S(t) = (1 - c^(t + 1)) / (1 - c)."""
    run = jax.jit(partial(occupancy, implementation=implementation))
    for c in (0.5, 0.99, 1 - 1e-4):
        log_beta = jnp.full((1, 1, 300), np.log(c), jnp.float32)
        exact = np.exp(float(log_beta[0, 0, 0]))
        wanted = (1 - exact ** np.arange(1, 301)) / (1 - exact)
        np.testing.assert_allclose(run(log_beta, rows(np.zeros(300)))[0, 0], wanted, rtol=3e-6)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_full_retention_counts_the_tokens_so_far(form):
    found = form(jnp.zeros((2, 1, 45)), rows(PACKED))
    counts = [*range(1, 15), *range(1, 20), 1, *range(1, 9), 0, 0, 0]
    np.testing.assert_array_equal(found[:, 0], [counts, list(range(1, 46))])


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_padding_gets_zero_and_gives_no_gradient(form):
    log_beta = case(2, 3, 45, seed=4)
    for array in value_and_gradient(form)(log_beta, rows(PACKED)):
        np.testing.assert_array_equal(array[0, :, -3:], 0)
    for array in value_and_gradient(form)(log_beta, rows(-np.ones((2, 45)))):
        np.testing.assert_array_equal(array, np.zeros(array.shape))


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
@pytest.mark.parametrize("rate", [0.0, -1e-8, -50.0, -1e30, -3.4028235e38, -np.inf])
def test_extreme_retention_stays_exact_in_value_and_gradient(form, rate):
    """Rates next to 0 keep the gradient that moves them; enormous ones leave only the token."""
    log_beta = jnp.full((2, 3, 45), rate, jnp.float32)
    found, gradient = value_and_gradient(form)(log_beta, rows(PACKED))
    finite = np.maximum(np.asarray(log_beta, np.float64), -1e38)
    np.testing.assert_allclose(found, definition(finite, PACKED), rtol=1e-6)
    wanted = slopes(finite, PACKED, probe(found.shape))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=2e-5)


def test_rates_next_to_zero_are_not_rounded_away():
    """beta is 1 - 1e-6, and S(t) falls short of t + 1 by about t (t + 1) / 2 * 1e-6: 2 tokens."""
    log_beta = jnp.full((1, 1, 2000), -1e-6, jnp.float32)
    found = jax.jit(occupancy)(log_beta, rows(np.zeros(2000)))
    ages = np.arange(2000)
    wanted = np.cumsum(np.exp(-1e-6 * ages))
    np.testing.assert_allclose(found[0, 0], wanted, rtol=2e-6)
    assert found[0, 0, -1] < 1999


def test_vmap_equals_a_loop():
    log_betas = jnp.stack([case(1, 2, 41, seed=seed) for seed in (5, 6, 7)])
    segments = rows([PACKED[0][:41], PACKED[0][4:], [0] * 41])[:, None]
    run = value_and_gradient(in_blocks)
    found, gradient = jax.vmap(run)(log_betas, segments)
    for n in range(3):
        wanted, wanted_gradient = run(log_betas[n], segments[n])
        np.testing.assert_allclose(found[n], wanted, rtol=1e-6)
        np.testing.assert_allclose(gradient[n], wanted_gradient, rtol=1e-5, atol=1e-5)


def test_skipped_blocks_are_never_read():
    """Poison in another document's blocks reaches neither the values nor the gradient."""
    log_beta = case(1, 2, 41, seed=8).at[:, :, 32:].set(jnp.nan)
    segments = rows([0] * 32 + [1] * 9)
    for array in value_and_gradient(in_blocks)(log_beta, segments):
        assert np.isfinite(array[:, :, :32]).all()


def test_tiles_visited_hold_few_pairs_beside_those_that_count():
    """Blocks of 128: at most half as many more from four blocks on, and across documents too."""
    block = 128
    for documents in (1, 2):
        segments = rows(np.repeat(np.arange(documents), 1024 // documents))
        everyone = tokens(segments)
        first, last = visible_ranges(everyone, everyone, block, block)
        needed = int(np.sum(np.asarray(visible(everyone, everyone))))
        visited = int(np.sum(np.asarray(last) - np.asarray(first))) * block**2
        assert needed <= visited <= 1.5 * needed


def working_memory(form, length, count=None):
    """Bytes that a compiled forward and backward pass needs beside its arguments and results."""
    log_beta = jax.ShapeDtypeStruct((1, 2, length), jnp.float32)
    shapes = [(1, length)] + ([] if count is None else [(1, count)])
    rest = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    compiled = value_and_gradient(form).lower(log_beta, *rest).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_in_blocks_is_linear_in_length():
    short, long = (working_memory(blockwise.occupancy, length) for length in (1024, 2048))
    assert long < 2.1 * short
    assert long < 2048 * 2048 * 4 / 8  # far from one array of all pairs
    assert working_memory(dense, 1024) > 1024 * 1024 * 4


def test_memory_of_samples_is_linear_in_length_and_in_samples():
    base, longer, more = (
        working_memory(blockwise.occupancy_at, length, count)
        for length, count in ((1024, 512), (2048, 512), (1024, 1024))
    )
    assert longer < 2.1 * base
    assert more < 2.1 * base
    assert base < 1024 * 512 * 4 / 4


@pytest.mark.parametrize("length", [128, 129])
def test_automatic_choice_agrees_on_both_sides_of_its_threshold(length):
    log_beta = case(1, 2, length, seed=9)
    segments, at = rows(np.zeros(length)), rows(np.arange(0, length, 7))
    wanted = dense(log_beta, segments)
    np.testing.assert_allclose(jax.jit(occupancy)(log_beta, segments), wanted, rtol=2e-6)
    found = jax.jit(occupancy_at)(log_beta, segments, at)
    np.testing.assert_allclose(found, wanted[:, :, at[0]], rtol=2e-6)


def test_calls_that_cannot_be_served_are_refused_with_what_to_do():
    log_beta, segments = case(1, 2, 4), rows(np.zeros(4))
    with pytest.raises(Exception, match="triton"):
        occupancy(log_beta, segments, implementation="triton")
    with pytest.raises(Exception, match="triton"):
        occupancy_at(log_beta, segments, segments, implementation="triton")
    with pytest.raises(ValueError, match="compute it in float32"):
        occupancy(log_beta.astype(jnp.bfloat16), segments)
