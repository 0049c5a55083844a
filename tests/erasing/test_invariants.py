"""What holds of erasing whatever the numbers: where it writes, what it reads, what it costs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.erasing import Extent, apply
from kvjax.erasing.steering import KVEraser
from kvjax.learned.eraser import EraserConfig, init_eraser
from tests import tiny
from tests.erasing.setting import SPANS, erased, eraser, rows_of
from tests.test_compilation import no_compilation


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def steer(cache, tokens=None, spans=None, adapters=None, model=None):
    return kvjax.erase(
        tiny.model() if model is None else model,
        eraser() if adapters is None else adapters,
        cache,
        tiny.tokens() if tokens is None else tokens,
        rows_of() if spans is None else spans,
    )


def span_mask(positions: np.ndarray) -> np.ndarray:
    """[L, B, K, S]: the slots of each row's span."""
    start, stop = (np.array(bound)[None, :, None, None] for bound in zip(*SPANS, strict=True))
    return (positions >= start) & (positions < stop)


def assert_same(found, wanted) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_an_untrained_eraser_changes_nothing():
    before = tiny.full()[1]
    after = steer(before, adapters=eraser(trained=False))
    np.testing.assert_allclose(after.keys, before.keys, atol=1e-5)
    np.testing.assert_allclose(after.values, before.values, atol=1e-5)
    question = tiny.tokens(3)[:, :5]
    logits = [kvjax.extend(tiny.model(), cache, question)[0] for cache in (before, after)]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)


def test_only_the_keys_and_values_of_the_span_change():
    before, after = tiny.full()[1], steer(tiny.full()[1])
    inside = span_mask(np.asarray(before.positions))
    for name in ("keys", "values"):
        old, new = np.asarray(getattr(before, name)), np.asarray(getattr(after, name))
        np.testing.assert_array_equal(new[~inside], old[~inside])
        assert (new[inside] != old[inside]).any(axis=-1).all()
    for name in ("positions", "lengths", "next_position", "overflowed"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


def test_the_first_layer_after_delete_and_shift_is_that_of_full_recomputation():
    shifted, exact = erased("delete-and-shift"), erased("recompute")
    np.testing.assert_allclose(shifted.keys[0], exact.keys[0], atol=1e-5)
    np.testing.assert_allclose(shifted.values[0], exact.values[0], atol=1e-5)
    assert not np.allclose(shifted.values[1:], exact.values[1:], atol=1e-2)


def test_without_a_suffix_nothing_has_to_be_recomputed():
    spans = rows_of(((40, 48), (30, 31), (4, 7)))
    exact = erased("recompute", spans)
    for method in ("delete-and-shift", "local-repair", "cacheblend"):
        assert_same(erased(method, spans), exact)


def test_local_repair_lies_between_delete_and_shift_and_full_recomputation():
    assert_same(erased("local-repair", tokens=0), erased("delete-and-shift"))
    everything, exact = erased("local-repair", tokens=64), erased("recompute")
    np.testing.assert_allclose(everything.keys, exact.keys, atol=1e-5)
    np.testing.assert_allclose(everything.values, exact.values, atol=1e-5)


def test_keys_before_the_span_stay_to_the_bit_when_the_suffix_moves():
    before, after = tiny.full()[1], erased("recompute")
    for row, (start, _) in enumerate(SPANS):
        for name in ("keys", "values"):
            old, new = getattr(before, name), getattr(after, name)
            np.testing.assert_array_equal(new[:, row, :, :start], old[:, row, :, :start])


def test_steering_states_depend_on_prefix_and_span_alone():
    def states(tokens: np.ndarray) -> np.ndarray:
        cache = tiny.prefill(tokens, tiny.LENGTHS, tiny.LENGTHS, kvjax.policy("full"))[1]
        return np.asarray(steer(cache, tokens).values)[:, 0, :, 9:17]

    tokens = tiny.tokens()
    first = states(tokens)
    for place, same in ((17, True), (47, True), (8, False), (9, False), (16, False)):
        other = tokens.copy()
        other[0, place] = 1 + tokens[0, place] % 96
        assert np.array_equal(states(other), first) == same


def test_a_row_equals_itself_alone():
    after = steer(tiny.full()[1])
    for row, span in enumerate(SPANS):
        length = int(tiny.LENGTHS[row])
        alone = kvjax.take_rows(tiny.full()[1], [row])
        found = steer(alone, tiny.tokens()[row : row + 1, :length], span)
        np.testing.assert_allclose(found.keys, after.keys[:, row : row + 1], atol=1e-5)
        np.testing.assert_allclose(found.values, after.values[:, row : row + 1], atol=1e-5)


def test_rows_without_a_span_are_left_alone():
    spans = rows_of()
    spans[1] = 0
    before = tiny.full()[1]
    for method in ("kveraser", "recompute", "hybrid", "cacheblend", "local-repair", "mask"):
        after = erased(method, spans)
        assert_same(kvjax.take_rows(after, [1]), kvjax.take_rows(before, [1]))


def test_bfloat16_agrees_with_float32():
    exact = steer(tiny.full()[1])
    model = tiny.model("bfloat16")
    rounded = tiny.full(dtype="bfloat16")[1]
    after = steer(rounded, model=model)
    assert after.keys.dtype == jnp.bfloat16
    inside = span_mask(np.asarray(rounded.positions))
    for name in ("keys", "values"):
        new = np.asarray(getattr(after, name), np.float32)
        np.testing.assert_allclose(new, np.asarray(getattr(exact, name)), atol=0.5)
        assert np.abs(new - np.asarray(getattr(exact, name)))[inside].mean() < 0.03
        old = np.asarray(getattr(rounded, name), np.float32)
        np.testing.assert_array_equal(new[~inside], old[~inside])


def test_edits_of_one_bucket_share_a_compilation():
    before, tokens = tiny.full()[1], tiny.tokens()
    first = steer(before)
    with no_compilation():
        second = steer(before, np.roll(tokens, 1, axis=1), rows_of(((2, 40), (0, 5), (6, 7))))
        steer(before, tokens[:, :48], adapters=eraser(trained=False))
    assert not np.array_equal(first.values, second.values)


def test_erasing_inside_jit_needs_no_known_spans():
    @jax.jit
    def edit(cache, spans):
        return kvjax.erase(tiny.model(), eraser(), cache, jnp.asarray(tiny.tokens()), spans)

    inside = edit(tiny.full()[1], jnp.asarray(rows_of()))
    np.testing.assert_allclose(inside.keys, steer(tiny.full()[1]).keys, atol=1e-5)
    both = np.array([[(20, 25), (0, 6)], [(0, 0), (3, 9)], [(4, 6), (0, 3)]], np.int32)
    inside = edit(tiny.full()[1], jnp.asarray(both))  # in any order: from left to right
    np.testing.assert_allclose(inside.keys, erased("kveraser", both).keys, atol=1e-5)


@pytest.mark.parametrize("pages", [None, 16])
def test_a_donated_cache_is_edited_in_place(pages):
    def fresh():
        policy = kvjax.policy("full")
        return tiny.prefill(tiny.tokens(), tiny.LENGTHS, tiny.LENGTHS, policy, pages=pages)[1]

    given = fresh()
    place = given.keys.unsafe_buffer_pointer()
    after = kvjax.erase(
        tiny.model(), eraser(), given, tiny.tokens(), rows_of(), donate=True
    )  # fmt: skip
    assert given.keys.is_deleted()
    assert after.keys.unsafe_buffer_pointer() == place
    np.testing.assert_allclose(after.values, steer(fresh()).values, atol=1e-6)


@functools.cache
def flops(method: kvjax.erasing.Method, suffix: int) -> float:
    """Floating-point operations of an edit of 64 tokens behind 64, before `suffix` others."""
    config = tiny.CONFIG
    length = 128 + suffix
    arrays = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    cache = jax.eval_shape(
        lambda: kvjax.PaddedCache.empty(
            num_layers=3, batch=1, num_kv_heads=2, capacity=length, head_dim=8, dtype=jnp.float32
        )
    )
    run = jax.jit(apply, static_argnames=("method", "extent"))
    adapters = jax.eval_shape(lambda: init_eraser(EraserConfig(), jax.random.key(0), config))
    lowered = run.lower(
        kvjax.Decoder.abstract(config),
        adapters if method.needs_eraser else None,
        cache,
        arrays((1, length), dtype=jnp.int32),
        arrays((1, 1, 2), dtype=jnp.int32),
        method,
        Extent(span=64, prefix=64, suffix=suffix),
    )
    return lowered.compile().cost_analysis()["flops"]


def test_the_cost_of_steering_does_not_depend_on_the_suffix():
    assert flops(KVEraser(), 4096) < 1.1 * flops(KVEraser(), 512)
    recompute = kvjax.erasing_method("recompute")
    assert flops(recompute, 512) > 3 * flops(recompute, 64)
