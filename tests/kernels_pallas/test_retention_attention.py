"""Attention under retention decay: values and gradients against NumPy in float64."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.attention import NO_WINDOW, attention
from kernels_pallas.retention_attention import blockwise, reference, retention_attention
from kernels_pallas.retention_attention.segments import tokens, visible, visible_ranges

dense = jax.jit(reference.retention_attention)
in_blocks = jax.jit(partial(blockwise.retention_attention, query_block=8, key_block=16))
FORMS = [dense, in_blocks]
chosen = jax.jit(retention_attention, static_argnames="implementation")
NAMES = ["queries", "keys", "values", "log_beta"]

# Packed documents, one of them a single token, padding at the end; and a row of one document.
PACKED = [[0] * 14 + [1] * 19 + [2] + [3] * 8 + [-1] * 3, [5] * 45]


def definition(queries, keys, values, log_beta, segments, window=NO_WINDOW):
    """out_i = sum_j p_ij v_j with p_i = softmax_j(q_i k_j / sqrt(D) + (i - j) log_beta_j)."""
    queries, keys, values, log_beta = (
        np.asarray(a, np.float64) for a in (queries, keys, values, log_beta)
    )
    out = np.zeros(queries.shape)
    group = queries.shape[1] // keys.shape[1]
    for row, head, i in np.ndindex(queries.shape[:3]):
        segment, of = segments[row][i], head // group
        seen = [j for j in range(i + 1) if segments[row][j] == segment and i - j < window]
        if segment < 0 or not seen:
            continue
        logits = [
            queries[row, head, i] @ keys[row, of, j] / np.sqrt(queries.shape[-1])
            + (i - j) * log_beta[row, of, j]
            for j in seen
        ]
        share = np.exp(np.array(logits) - max(logits))
        out[row, head, i] = share / share.sum() @ values[row, of, seen]
    return out


def case(batch, kv_heads, group, length, size, seed=0, rate=0.2, dtype=jnp.float32):
    """Random tensors, and retention rates that are exponentially distributed."""
    draw = np.random.default_rng(seed)
    shapes = [(batch, kv_heads * group, length, size)] + [(batch, kv_heads, length, size)] * 2
    tensors = [jnp.asarray(draw.standard_normal(shape), dtype) for shape in shapes]
    log_beta = -draw.exponential(rate, (batch, kv_heads, length))
    return (*tensors, jnp.asarray(log_beta, jnp.float32))


def rows(segments):
    return jnp.asarray(np.atleast_2d(segments), jnp.int32)


def probe(shape):
    """Fixed weights that make a scalar of an output, different everywhere."""
    return np.cos(np.arange(np.prod(shape)) * 0.7).reshape(shape)


@cache
def value_and_gradients(form):
    """Jitted output, and the gradient of its probed sum in all four tensors."""

    @jax.jit
    def both(tensors, segments, window):
        out, pull = jax.vjp(lambda *t: form(*t, segments, window), *tensors)
        return out, pull(jnp.asarray(probe(out.shape), out.dtype))

    return both


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_output_equals_the_formula(form, group):
    tensors = case(2, 2, group, 45, 8)
    for window in (NO_WINDOW, 11, 1):
        found = form(*tensors, rows(PACKED), window)
        wanted = definition(*tensors, PACKED, window)
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("length", [1, 5, 16, 17])
def test_rows_of_any_length_equal_the_formula(length):
    """Shorter than a block, exactly one, and one token over."""
    tensors = case(1, 1, 2, length, 4)
    segments = np.zeros((1, length), int)
    found = in_blocks(*tensors, rows(segments))
    np.testing.assert_allclose(found, definition(*tensors, segments), atol=2e-6)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_gradients_equal_finite_differences_of_the_formula(form):
    """Central differences in float64; their own error is about 1e-10."""
    segments = [[0] * 6 + [1] * 3 + [-1]]
    tensors = case(1, 2, 2, 10, 3, seed=1)
    run = value_and_gradients(form)
    for window in (NO_WINDOW, 3):
        _, found = run(tensors, rows(segments), window)
        exact = [np.asarray(a, np.float64) for a in tensors]
        weights = probe(exact[0].shape)
        for name, array, gradient in zip(NAMES, exact, found, strict=True):
            wanted = np.zeros(array.shape)
            for place in np.ndindex(array.shape):
                ends = []
                for step in (1e-5, -1e-5):
                    array[place] += step
                    ends.append(np.sum(definition(*exact, segments, window) * weights))
                    array[place] -= step
                wanted[place] = (ends[0] - ends[1]) / 2e-5
            np.testing.assert_allclose(gradient, wanted, atol=3e-6, err_msg=name)


@pytest.mark.parametrize(("kv_heads", "group", "length"), [(1, 3, 75), (2, 2, 129)])
def test_gradients_in_blocks_equal_those_of_the_reference(kv_heads, group, length):
    tensors = case(2, kv_heads, group, length, 16, seed=2, rate=0.05)
    segments = np.zeros((2, length), int)
    segments[0, length // 3 :] = 1
    segments[0, -5:] = -1
    runs = [value_and_gradients(form) for form in FORMS]
    for window in (NO_WINDOW, 23):
        (wanted_out, wanted), (out, found) = (run(tensors, rows(segments), window) for run in runs)
        np.testing.assert_allclose(out, wanted_out, atol=2e-6)
        for name, ours, theirs in zip(NAMES, found, wanted, strict=True):
            # Ages of up to T multiply the rounding of the gradient of log_beta.
            tolerance = 2e-6 * length if name == "log_beta" else 1e-5
            np.testing.assert_allclose(ours, theirs, atol=tolerance, err_msg=name)


@given(seed=st.integers(0, 10**6), window=st.sampled_from([1, 2, 7, NO_WINDOW]), data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_segments_may_lie_in_any_order(seed, window, data):
    """Also documents that are interrupted, and padding anywhere."""
    runs = data.draw(st.lists(st.integers(-1, 3), min_size=2, max_size=9))
    segments = np.resize(np.repeat(runs, 41 // len(runs) + 1), (1, 41))
    tensors = case(1, 1, 2, 41, 4, seed)
    out, found = value_and_gradients(in_blocks)(tensors, rows(segments), window)
    _, wanted = value_and_gradients(dense)(tensors, rows(segments), window)
    np.testing.assert_allclose(out, definition(*tensors, segments, window), atol=2e-6)
    for name, ours, theirs in zip(NAMES, found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=name)


def test_queries_of_some_tokens_in_any_order_get_what_they_get_among_all():
    tensors, segments = case(2, 2, 2, 45, 8), rows(PACKED)
    some = np.array([40, 3, 17, 18, 44, 0])
    asking = jax.tree.map(lambda a: a[:, some], tokens(segments))

    def among_all(*tensors):
        return reference.retention_attention(*tensors, segments)[:, :, some]

    def alone(queries, *held):
        return in_blocks(queries[:, :, some], *held, segments, asking=asking)

    found, wanted = (jax.vjp(form, *tensors) for form in (alone, among_all))
    np.testing.assert_allclose(found[0], wanted[0], atol=2e-5)
    weights = jnp.asarray(probe(wanted[0].shape), jnp.float32)
    for name, got, right in zip(NAMES, found[1](weights), wanted[1](weights), strict=True):
        np.testing.assert_allclose(got, right, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_padding_gets_zero_and_gives_no_gradient(form):
    tensors = case(2, 2, 3, 45, 8, seed=3)
    out, gradients = value_and_gradients(form)(tensors, rows(PACKED), NO_WINDOW)
    for array in (out, *gradients):
        np.testing.assert_array_equal(np.asarray(array)[0, :, -3:], 0)
    out, gradients = value_and_gradients(form)(tensors, rows(-np.ones((2, 45))), NO_WINDOW)
    for array in (out, *gradients):
        np.testing.assert_array_equal(array, np.zeros(array.shape))


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_documents_packed_together_attend_as_if_alone(form):
    tensors = case(1, 2, 2, 45, 4, seed=4)
    out = form(*tensors, rows(PACKED[0]))
    alone = dense(*(a[:, :, 14:33] for a in tensors), rows(np.zeros(19)))
    np.testing.assert_allclose(out[:, :, 14:33], alone, atol=2e-6)


@pytest.mark.parametrize(
    ("implementation", "window"), [("reference", 20), ("blockwise", 20), (None, None)]
)
def test_full_retention_is_plain_attention(implementation, window):
    queries, keys, values, log_beta = case(2, 2, 3, 150, 16, seed=5)
    segments = rows(np.where(np.arange(150) < [[150], [90]], 0, -1))
    found = chosen(
        queries, keys, values, 0 * log_beta, segments, window=window, implementation=implementation
    )
    positions = jnp.where(segments >= 0, jnp.arange(150)[None], -1)
    spread = jnp.broadcast_to(positions[:, None], keys.shape[:3])
    plain = NO_WINDOW if window is None else window
    wanted, _ = attention(queries, keys, values, positions, spread, plain)
    np.testing.assert_allclose(found, wanted, atol=3e-6)


@pytest.mark.parametrize("form", [reference, blockwise])
@pytest.mark.parametrize("window", [NO_WINDOW, 11])
def test_segment_attention_is_that_without_decay_and_gives_its_log_sum_exp(form, window):
    queries, keys, values, _ = case(2, 2, 3, 45, 8, seed=14)
    form = partial(form.segment_attention, **({} if form is reference else {"query_block": 8}))
    out, lse = jax.jit(form)(queries, keys, values, rows(PACKED), window)
    wanted = definition(queries, keys, values, np.zeros((2, 2, 45)), PACKED, window)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    for row, head, i in np.ndindex(2, 6, 45):
        seen = [j for j in range(i + 1) if PACKED[row][j] == PACKED[row][i] >= 0 > i - j - window]
        logits = [queries[row, head, i] @ keys[row, head // 3, j] / np.sqrt(8) for j in seen]
        wanted = np.log(np.sum(np.exp(np.array(logits, np.float64)))) if seen else -np.inf
        np.testing.assert_allclose(lse[row, head, i], wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
@pytest.mark.parametrize("rate", [0.0, -1e-8, -50.0, -1e30, -3.4028235e38, -np.inf])
def test_extreme_retention_stays_exact_in_value_and_gradient(form, rate):
    """Rates next to 0 keep the gradient that lifts them; enormous ones leave only the token."""
    *tensors, log_beta = case(1, 1, 2, 41, 4, seed=6)
    uniform = jnp.full_like(log_beta, rate)
    segments = np.zeros((1, 41), int)
    tensors = (*tensors, uniform)
    out, gradients = value_and_gradients(form)(tensors, rows(segments), NO_WINDOW)
    finite = np.maximum(np.asarray(uniform, np.float64), -1e38)
    wanted = definition(*tensors[:3], finite, segments)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    if rate <= -50:
        np.testing.assert_allclose(out, jnp.repeat(tensors[2], 2, axis=1), atol=2e-6)
        np.testing.assert_allclose(gradients[3], np.zeros(log_beta.shape), atol=1e-6)
    else:
        for j in (0, 15, 16, 33, 40):
            ends = []
            for step in (1e-5, -1e-5):
                moved = finite.copy()
                moved[0, 0, j] += step
                out = definition(*tensors[:3], moved, segments)
                ends.append(np.sum(out * probe(out.shape)))
            slope = (ends[0] - ends[1]) / 2e-5
            np.testing.assert_allclose(gradients[3][0, 0, j], slope, atol=2e-5)


def test_one_dead_key_among_live_ones_makes_no_nan():
    tensors = case(1, 1, 2, 41, 4, seed=7)
    log_beta = tensors[3].at[0, 0, ::7].set(-jnp.inf)
    run = value_and_gradients(in_blocks)
    out, gradients = run((*tensors[:3], log_beta), rows(np.zeros(41)), NO_WINDOW)
    wanted = definition(*tensors[:3], np.maximum(log_beta, -1e38), np.zeros((1, 41)))
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("form", FORMS, ids=["reference", "blockwise"])
def test_bfloat16_in_and_out_with_float32_inside(form):
    """Operands carry 8 bits, 2^-9 of rounding: 3 % of the largest entry holds three roundings
    per product (weights, out, gradient of logits) at outputs of size 2 to 3."""
    half = case(2, 2, 3, 45, 8, seed=8, dtype=jnp.bfloat16)
    full = tuple(a.astype(jnp.float32) for a in half)
    out, gradients = value_and_gradients(form)(half, rows(PACKED), NO_WINDOW)
    wanted_out, wanted = value_and_gradients(dense)(full, rows(PACKED), NO_WINDOW)
    assert out.dtype == jnp.bfloat16
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 3 + [jnp.float32]
    for ours, theirs in zip((out, *gradients), (wanted_out, *wanted), strict=True):
        tolerance = 0.03 * float(jnp.max(jnp.abs(theirs)))
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=tolerance)


def test_bfloat16_does_not_round_the_decay():
    """With log_beta -1e-3 the bias of age 300 is -0.3; bfloat16 would move it by 1e-3 per key."""
    length = 300
    flat = jnp.zeros((1, 1, length, 8), jnp.bfloat16)
    values = jnp.zeros_like(flat).at[0, 0, 0].set(1)
    log_beta = jnp.full((1, 1, length), -1e-3)
    out = in_blocks(flat, flat, values, log_beta, rows(np.zeros(length)))
    ages = np.arange(length)[::-1]
    share = np.exp(-1e-3 * ages[0]) / np.exp(-1e-3 * ages).sum()
    np.testing.assert_allclose(float(out[0, 0, -1, 0]), share, rtol=2**-8)


def test_vmap_over_everything_equals_a_loop():
    several = [case(1, 1, 2, 41, 4, seed=seed) for seed in (9, 10, 11)]
    segments = rows([PACKED[0][:41], PACKED[0][4:], [0] * 41])[:, None]
    windows = jnp.array([NO_WINDOW, 5, 40])
    run = value_and_gradients(in_blocks)
    stacked = tuple(jnp.stack(arrays) for arrays in zip(*several, strict=True))
    out, gradients = jax.vmap(run)(stacked, segments, windows)
    for n, tensors in enumerate(several):
        wanted_out, wanted = run(tensors, segments[n], windows[n])
        np.testing.assert_allclose(out[n], wanted_out, atol=1e-6)
        for ours, theirs in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(ours[n], theirs, atol=1e-5)


def ranges(segments, block=16, window=NO_WINDOW):
    everyone = tokens(rows(segments))
    first, last = visible_ranges(everyone, everyone, block, block, window)
    return list(zip(first.tolist(), last.tolist(), strict=True))


def test_blocks_above_the_diagonal_are_not_visited():
    assert ranges([0] * 64) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_blocks_before_the_window_and_of_other_documents_are_not_visited():
    assert ranges([0] * 64, window=16) == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert ranges([0] * 40 + [1] * 24) == [(0, 1), (0, 2), (0, 3), (2, 4)]
    both = ranges([[0] * 64, [0] * 32 + [1] * 32])
    assert both == [(0, 1), (0, 2), (0, 3), (0, 4)]  # a row needs them


def test_blocks_of_padding_are_not_visited():
    found = ranges([0] * 20 + [-1] * 44)
    assert found[:2] == [(0, 1), (0, 2)]
    assert all(first == last for first, last in found[2:])


def test_skipped_blocks_are_never_read():
    """Poison in another document's blocks reaches neither the output nor any gradient."""
    queries, keys, values, log_beta = case(1, 1, 2, 41, 4, seed=12)
    segments = rows([0] * 32 + [1] * 9)
    poisoned = (queries, keys.at[:, :, 32:].set(jnp.nan), values, log_beta)
    out, gradients = value_and_gradients(in_blocks)(poisoned, segments, NO_WINDOW)
    for array in (out, *gradients):
        assert np.isfinite(np.asarray(array)[:, :, :32]).all()


def test_visible_is_the_rule_of_segments_and_order():
    segments = np.array([[0, 0, 1, 1, -1, 0]])
    everyone = tokens(rows(segments))
    for window in (1, 2, NO_WINDOW):
        found = np.asarray(visible(everyone, everyone, window))[0]
        for (i, j), seen in np.ndenumerate(found):
            same = segments[0, i] == segments[0, j] >= 0
            assert seen == (same and 0 <= i - j < window)


def working_memory(form, length):
    """Bytes that a compiled forward and backward pass needs beside its arguments and results."""
    shapes = [(1, 2, length, 8), (1, 1, length, 8), (1, 1, length, 8), (1, 1, length)]
    tensors = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    window = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = value_and_gradients(form).lower(tensors, segments, window).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_in_blocks_is_linear_in_length():
    short, long = (working_memory(blockwise.retention_attention, t) for t in (1024, 2048))
    assert long < 2.1 * short
    assert long < 2048 * 2048 * 4 / 4  # far from one array of all pairs
    assert working_memory(dense, 1024) > 1024 * 1024 * 4


def test_automatic_choice_agrees_on_both_sides_of_its_threshold():
    for length in (128, 129):
        tensors = case(1, 1, 1, length, 4, seed=13)
        segments = rows(np.zeros(length))
        wanted = dense(*tensors, segments)
        np.testing.assert_allclose(chosen(*tensors, segments), wanted, atol=2e-6)


def test_calls_that_cannot_be_served_are_refused_with_what_to_do():
    queries, keys, values, log_beta = case(1, 2, 2, 4, 4)
    segments = rows(np.zeros(4))
    with pytest.raises(Exception, match="triton"):
        retention_attention(queries, keys, values, log_beta, segments, implementation="triton")
    with pytest.raises(ValueError, match="3 query heads cannot share 2 KV heads"):
        retention_attention(queries[:, :3], keys, values, log_beta, segments)
    with pytest.raises(ValueError, match="one dtype"):
        retention_attention(queries, keys, values.astype(jnp.bfloat16), log_beta, segments)
    with pytest.raises(ValueError, match="compute it in float32"):
        retention_attention(queries, keys, values, log_beta.astype(jnp.bfloat16), segments)
