"""Attention over positioned slots: reference, blocks and merge against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.attention import (
    NO_WINDOW,
    attention,
    blockwise,
    causal_attention,
    library,
    merge,
    reference,
    visible,
)
from kernels_pallas.attention.blocks import block_bounds, visible_range
from tests.kernels_pallas import definitions

# (batch, kv_heads, group, queries, slots, size), and whether in bfloat16
SHAPES = [
    ((2, 2, 1, 33, 70, 16), False),
    ((1, 2, 3, 17, 33, 64), False),
    ((2, 1, 4, 1, 129, 80), False),
    ((1, 1, 8, 40, 40, 128), False),
    ((2, 2, 3, 19, 51, 64), True),
]


small = (2, 2, 2, 11, 26, 8)
dense = jax.jit(reference.attention)
merged = jax.jit(merge)


def case(shape, seed=0, holes=0.2, dtype=jnp.float32):
    """Random tensors; slots at gapped ascending positions with holes, queries at gapped ones.

    The first head holds nothing, the last query of each row is padding.
    """
    batch, kv_heads, group, count, slots, size = shape
    draw = np.random.default_rng(seed)
    tensors = [
        jnp.asarray(draw.standard_normal(s), dtype)
        for s in (
            (batch, kv_heads * group, count, size),
            (batch, kv_heads, slots, size),
            (batch, kv_heads, slots, size),
        )
    ]
    places = np.sort(
        np.stack([draw.choice(2 * slots, slots, replace=False) for _ in range(batch * kv_heads)]),
        axis=1,
    ).reshape(batch, kv_heads, slots)
    places = np.where(draw.random(places.shape) < holes, -1, places)
    places[0, 0] = -1
    asked = np.sort(
        np.stack([draw.choice(2 * slots, count, replace=False) for _ in range(batch)]), axis=1
    )
    if count > 1:
        asked[:, -1] = -1
    return (*tensors, jnp.asarray(asked, jnp.int32), jnp.asarray(places, jnp.int32))


def assert_is_attention(found, inputs, window, tolerance):
    out, lse, _ = definitions.attention(*(np.asarray(a) for a in inputs), window)
    np.testing.assert_allclose(np.asarray(found[0], np.float64), out, atol=tolerance)
    np.testing.assert_allclose(np.asarray(found[1], np.float64), lse, atol=tolerance)


@pytest.mark.parametrize("window", [NO_WINDOW, 9])
@pytest.mark.parametrize(("shape", "half"), SHAPES)
def test_reference_equals_float64_definition(shape, half, window):
    inputs = case(shape, dtype=jnp.bfloat16 if half else jnp.float32)
    found = dense(*inputs, window)
    assert found[0].dtype == inputs[0].dtype
    assert found[1].dtype == jnp.float32
    assert_is_attention(found, inputs, window, 3e-2 if half else 1e-5)


@pytest.mark.parametrize(("shape", "half"), SHAPES)
def test_blocks_equal_reference_whatever_the_blocks_divide(shape, half):
    inputs = case(shape, seed=1, dtype=jnp.bfloat16 if half else jnp.float32)
    in_blocks = jax.jit(
        lambda window: blockwise.attention(*inputs, window, query_block=8, key_block=16)
    )
    for window in (NO_WINDOW, 9):
        out, lse = in_blocks(window)
        wanted_out, wanted_lse = dense(*inputs, window)
        tolerance = 3e-2 if half else 1e-5
        np.testing.assert_allclose(
            np.asarray(out, np.float32), np.asarray(wanted_out, np.float32), atol=tolerance
        )
        np.testing.assert_allclose(lse, wanted_lse, atol=tolerance)
        assert out.dtype == inputs[0].dtype


small_in_blocks = jax.jit(lambda inputs, window: blockwise.attention(
    *inputs, window, query_block=4, key_block=8
))  # fmt: skip


@given(
    seed=st.integers(0, 10**6),
    holes=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    window=st.sampled_from([1, 2, 7, 30, NO_WINDOW]),
    shuffled=st.booleans(),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_blocks_equal_definition_for_any_positions(seed, holes, window, shuffled):
    *tensors, asked, places = case(small, seed, holes)
    if shuffled:  # the mask is a function of positions, never of the order of slots
        order = np.random.default_rng(seed).permutation(small[4])
        places = places[:, :, order]
    inputs = (*tensors, asked, places)
    found = small_in_blocks(inputs, window)
    assert_is_attention(found, inputs, window, 1e-5)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_queries_that_see_nothing_get_zero_and_minus_infinity(implementation):
    queries, keys, values, asked, places = case(small, seed=3)
    nothing = jnp.full_like(places, -1)
    out, lse = attention(queries, keys, values, asked, nothing, implementation=implementation)
    np.testing.assert_array_equal(out, np.zeros(out.shape))
    np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))
    out, lse = attention(
        queries, keys, values, jnp.full_like(asked, -1), places, implementation=implementation
    )
    np.testing.assert_array_equal(out, np.zeros(out.shape))
    np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_huge_logits_stay_finite(implementation):
    queries, keys, values, asked, places = case(small, seed=4)
    out, lse = attention(
        queries * 1e3, keys * 1e3, values, asked, places, implementation=implementation
    )
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()
    assert np.abs(out).max() <= np.abs(values).max() + 1e-5


def test_merge_of_two_parts_is_attention_over_the_union():
    inputs = case((2, 2, 3, 9, 30, 16), seed=5)
    queries, keys, values, asked, places = inputs
    for cut in (1, 13):
        first, second = (
            dense(queries, keys[:, :, s], values[:, :, s], asked, places[:, :, s])
            for s in (slice(None, cut), slice(cut, None))
        )
        assert_is_attention(merged(first, second), inputs, NO_WINDOW, 1e-5)
        assert_is_attention(merged(second, first), inputs, NO_WINDOW, 1e-5)


def test_merge_with_an_empty_part_changes_nothing():
    queries, keys, values, asked, places = case((2, 2, 3, 9, 30, 16), seed=6)
    whole = dense(queries, keys, values, asked, places)
    nothing = dense(queries, keys, values, asked, jnp.full_like(places, -1))
    for out, lse in (merged(whole, nothing), merged(nothing, whole)):
        np.testing.assert_allclose(out, whole[0], atol=1e-6)
        np.testing.assert_allclose(lse, whole[1], atol=1e-6)
    out, lse = merged(nothing, nothing)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


def test_merge_of_bfloat16_parts_keeps_float32_weights():
    queries, keys, values, asked, places = case((1, 2, 2, 6, 24, 32), seed=7, dtype=jnp.bfloat16)
    parts = [
        dense(queries, keys[:, :, s], values[:, :, s], asked, places[:, :, s])
        for s in (slice(None, 10), slice(10, None))
    ]
    out, lse = merged(*parts)
    assert out.dtype == jnp.bfloat16
    wanted, wanted_lse, _ = definitions.attention(
        *(np.asarray(a) for a in (queries, keys, values, asked, places))
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=3e-2)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


def blocks_visited(query_positions, key_positions, block, window=NO_WINDOW):
    bounds = block_bounds(key_positions, block)
    ranges = [
        visible_range(bounds, query_positions[:, at : at + block], window)
        for at in range(0, query_positions.shape[1], block)
    ]
    return [(int(first), int(last)) for first, last in ranges]


def test_causal_prefill_visits_only_the_causal_half():
    positions = jnp.arange(1024, dtype=jnp.int32)[None]
    visited = blocks_visited(positions, positions[:, None], 128)
    assert visited == [(0, i + 1) for i in range(8)]


def test_sliding_window_visits_only_blocks_inside_it():
    positions = jnp.arange(1024, dtype=jnp.int32)[None]
    visited = blocks_visited(positions, positions[:, None], 128, window=100)
    assert visited == [(0, 1)] + [(i - 1, i + 1) for i in range(1, 8)]


def test_padding_and_empty_blocks_are_not_visited():
    positions = jnp.where(jnp.arange(1024) < 200, jnp.arange(1024), -1).astype(jnp.int32)[None]
    visited = blocks_visited(positions, positions[:, None], 128)
    assert visited[:2] == [(0, 1), (0, 2)]
    assert all(first == last for first, last in visited[2:])


def test_values_of_skipped_blocks_are_never_read():
    size, slots = 16, 64
    draw = np.random.default_rng(8)
    queries = jnp.asarray(draw.standard_normal((1, 2, 16, size)), jnp.float32)
    keys = jnp.asarray(draw.standard_normal((1, 1, slots, size)), jnp.float32)
    place = jnp.arange(slots, dtype=jnp.int32)
    poisoned = jnp.where(place[None, None, :, None] >= 16, jnp.nan, keys)
    out, _ = blockwise.attention(
        queries, keys, poisoned, place[None, :16], place[None, None], query_block=8, key_block=8
    )
    assert np.isfinite(out).all()


def test_visible_is_the_rule_of_positions():
    asked = np.array([[-1, 0, 3, 9]], np.int32)
    places = np.array([[-1, 0, 2, 3, 8, 10]], np.int32)
    for window in (1, 4, NO_WINDOW):
        found = visible(jnp.asarray(asked), jnp.asarray(places), window)
        for (_, q, s), seen in np.ndenumerate(np.asarray(found)):
            assert seen == definitions.sees(asked[0, q], places[0, s], window)


def test_automatic_choice_agrees_on_both_sides_of_its_threshold():
    inputs = case((1, 1, 1, 300, 500, 8), seed=9)  # 150,000 logits: blocks
    chosen = attention(*inputs)
    wanted = dense(*inputs)
    np.testing.assert_allclose(chosen[0], wanted[0], atol=1e-5)
    np.testing.assert_allclose(chosen[1], wanted[1], atol=1e-5)


def test_unknown_implementation_is_refused_by_name():
    with pytest.raises(Exception, match="triton"):
        attention(*case(small), implementation="triton")


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_gradients_equal_finite_differences_of_the_definition(implementation):
    """Of the log-sum-exp too: parts of attention are merged by it."""
    *tensors, asked, places = case(small, seed=7)
    draw = np.random.default_rng(1)
    weights = draw.standard_normal(tensors[0].shape), draw.standard_normal(tensors[0].shape[:3])

    def loss(*tensors):
        out, lse = attention(*tensors, asked, places, implementation=implementation)
        lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(weights[0] * out) + jnp.sum(weights[1].astype(np.float32) * lse)

    def exact(tensors):
        out, lse, _ = definitions.attention(*tensors, np.asarray(asked), np.asarray(places))
        return np.sum(weights[0] * out) + np.sum(weights[1] * np.where(np.isfinite(lse), lse, 0))

    gradients = jax.grad(loss, argnums=(0, 1, 2))(*tensors)
    at = [np.asarray(tensor, np.float64) for tensor in tensors]
    for number, gradient in enumerate(gradients):
        towards = draw.standard_normal(at[number].shape)
        step = 1e-5
        moved = [
            [a + sign * step * towards if i == number else a for i, a in enumerate(at)]
            for sign in (1, -1)
        ]
        wanted = (exact(moved[0]) - exact(moved[1])) / (2 * step)
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * towards), wanted, rtol=1e-4)


@pytest.mark.parametrize("window", [NO_WINDOW, 9])
@pytest.mark.parametrize("holes", [0.0, 0.5])
@pytest.mark.parametrize("blocks", [(4, 8), (5, 7), (256, 256)])
def test_gradients_in_blocks_are_the_references(blocks, holes, window):
    """Of output and log-sum-exp together; some queries see nothing where slots are empty."""
    *tensors, asked, places = case(small, seed=11, holes=holes)
    weights = jax.random.normal(jax.random.key(2), (*tensors[0].shape[:3], tensors[0].shape[3] + 1))

    def loss(tensors, attend):
        out, lse = attend(*tensors, asked, places, window)
        lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(weights[..., :-1] * out) + jnp.sum(weights[..., -1] * lse)

    def in_blocks(*arguments):
        return blockwise.attention(*arguments, query_block=blocks[0], key_block=blocks[1])

    wanted = jax.grad(loss)(tuple(tensors), reference.attention)
    found = jax.jit(jax.grad(lambda tensors: loss(tensors, in_blocks)))(tuple(tensors))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_gradients_of_half_precision_are_near_those_of_single():
    *tensors, asked, places = case((2, 2, 2, 33, 70, 64), seed=12, dtype=jnp.bfloat16)

    def loss(tensors, attend):
        out, lse = attend(*tensors, asked, places)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.where(lse > -1e30, lse, 0.0))

    def in_blocks(*arguments):
        return blockwise.attention(*arguments, query_block=8, key_block=16)

    exact = jax.grad(loss)(tuple(a.astype(jnp.float32) for a in tensors), reference.attention)
    found = jax.grad(loss)(tuple(tensors), in_blocks)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=0.02 * np.abs(other).max())


def test_queries_that_see_nothing_give_no_gradient_whatever_is_asked_of_them():
    *tensors, asked, places = case(small, seed=3)
    asked = asked.at[:, 2].set(-1)
    found, backward = jax.vjp(
        lambda *tensors: blockwise.attention(*tensors, asked, places, query_block=4, key_block=8),
        *tensors,
    )
    blind = ~jnp.isfinite(found[1])
    assert blind.any()
    given = jnp.ones_like(found[0]), jnp.where(blind, jnp.nan, 1.0)
    for gradient in backward(given):
        assert np.isfinite(gradient).all()


def test_a_prompts_gradients_by_a_library_kernel_are_the_references(monkeypatch):
    """A maintained kernel gives output and log-sum-exp; the gradient is made from them."""
    queries, keys, values, *_ = case((2, 4, 2, 24, 24, 16), seed=5)
    index = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (2, 24))
    positions = jnp.where(index < jnp.array([[24], [17]]), index, -1)
    spread = jnp.broadcast_to(positions[:, None], keys.shape[:3])

    def kernel(q, k, v):
        found = reference.attention(q, k, v, index, jnp.broadcast_to(index[:, None], spread.shape))
        return jax.lax.stop_gradient(found)

    monkeypatch.setattr(library, "splash", kernel)
    real = (positions >= 0)[:, None, :]

    def loss(tensors, attend):
        out, lse = attend(*tensors)
        return jnp.sum(jnp.where(real[..., None], jnp.sin(out), 0.0)) + jnp.sum(
            jnp.where(real, jnp.where(real, lse, 0.0) ** 2, 0.0)
        )

    tensors = (queries, keys, values)
    found = jax.grad(loss)(
        tensors, lambda *a: causal_attention(*a, positions, implementation="splash")
    )
    wanted = jax.grad(loss)(tensors, lambda *a: reference.attention(*a, positions, spread))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
