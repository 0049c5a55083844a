"""Erasing from caches that have lost entries, in either layout, head by head."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache.entries import entry_positions, slot_state
from tests import tiny
from tests.erasing import by_hand
from tests.erasing.setting import SPANS, check, entries, eraser, row_tokens, rows_of, whole, without

HALF = np.array([24, 16, 4], np.int32)
ROWS = range(3)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


@cache
def evicted(name: str = "ada-snapkv", **options):
    """A cache at half size whose heads hold different positions."""
    pages = options.pop("pages", None)
    policy = tiny.policy(name, **options)
    return tiny.prefill(tiny.tokens(), tiny.LENGTHS, HALF, policy, pages=pages)[1]


def erased(before, method: str = "kveraser", spans=None, **options):
    return kvjax.erase(
        tiny.model(), eraser(), before, tiny.tokens(), rows_of() if spans is None else spans,
        method=kvjax.erasing_method(method, **options),
    )  # fmt: skip


def holders(before, row: int) -> np.ndarray:
    """[L, K, T]: which heads still hold each position."""
    held = np.zeros((3, 2, tiny.LENGTHS[row]), bool)
    for layer, heads in enumerate(entries(before, row)):
        for head, (positions, *_) in enumerate(heads):
            held[layer, head, positions] = True
    return held


def seen_by(before, row: int, queries: np.ndarray) -> np.ndarray:
    """[L, K, T, T]: `queries` see each other and what the heads hold, others everything."""
    length = tiny.LENGTHS[row]
    visible = by_hand.causal(tiny.model(), length)
    lost = ~holders(before, row)[:, :, None, :] & ~queries[None, None, None]
    return visible & ~(lost & queries[None, None, :, None])


@pytest.mark.parametrize("pages", [None, 16])
def test_the_span_is_encoded_over_what_each_head_still_has(pages):
    before = evicted(pages=pages)
    after = erased(before)
    for row in ROWS:
        start, stop = SPANS[row]
        place = np.arange(tiny.LENGTHS[row])
        inside = (place >= start) & (place < stop)
        held = holders(before, row)
        assert held[:, :, ~inside].any() and not held.all()
        found = by_hand.states(
            tiny.model(), row_tokens(row), visible=seen_by(before, row, inside),
            eraser=eraser(), adapted=inside,
            kept=(whole(row).keys, whole(row).values, np.tile(~inside, (3, 1))),
        )  # fmt: skip
        check(after, row, found.keys, found.values, held=lambda *at, h=held: np.flatnonzero(h[at]))


@pytest.mark.parametrize("pages", [None, 16])
def test_full_recomputation_replaces_what_is_left_of_the_suffix(pages):
    before = evicted(pages=pages)
    after = erased(before, "recompute")
    for row in ROWS:
        start, stop = SPANS[row]
        tokens = without(row_tokens(row), [SPANS[row]])
        held = np.delete(holders(before, row), np.arange(start, stop), axis=2)
        again = np.arange(len(tokens)) >= start
        lost = ~held[:, :, None, :] & ~again[None, None, None] & again[None, None, :, None]
        plain = by_hand.states(tiny.model(), tokens)
        found = by_hand.states(
            tiny.model(), tokens, visible=by_hand.causal(tiny.model(), len(tokens)) & ~lost,
            kept=(plain.keys, plain.values, np.tile(~again, (3, 1))),
        )  # fmt: skip
        check(after, row, found.keys, found.values, held=lambda *at, h=held: np.flatnonzero(h[at]))


@pytest.mark.parametrize(
    "method",
    ["mask", "delete-and-shift", "local-repair", "cacheblend", "recompute", "kveraser", "hybrid"],
)
def test_a_paged_cache_holds_what_a_padded_one_does(method):
    padded, paged = (erased(evicted(pages=pages), method) for pages in (None, 16))
    for row in ROWS:
        for a, b in zip(entries(padded, row), entries(paged, row), strict=True):
            for one, other in zip(a, b, strict=True):
                np.testing.assert_array_equal(one[0], other[0])
                np.testing.assert_allclose(one[1], other[1], atol=1e-5)
                np.testing.assert_allclose(one[2], other[2], atol=1e-5)
    np.testing.assert_array_equal(padded.next_position, paged.next_position)


def test_pages_of_dropped_slots_return_to_the_pool():
    before = evicted(pages=16)
    spans = rows_of(((0, 46), (0, 30), (0, 6)))
    after = erased(before, "mask", spans)
    assert (np.asarray(after.free_count) > np.asarray(before.free_count)).any()
    assert int(after.lengths.sum()) < int(before.lengths.sum())


def test_nothing_of_a_paged_cache_changes_but_the_span():
    before, after = evicted(pages=16), erased(evicted(pages=16))
    positions = np.asarray(entry_positions(before))
    np.testing.assert_array_equal(positions, entry_positions(after))
    changed = 0
    for row, (start, stop) in enumerate(SPANS):
        for old_heads, new_heads in zip(entries(before, row), entries(after, row), strict=True):
            for old, new in zip(old_heads, new_heads, strict=True):
                inside = (old[0] >= start) & (old[0] < stop)
                for a, b in zip(old[1:], new[1:], strict=True):
                    np.testing.assert_array_equal(a[~inside], b[~inside])
                    changed += (a[inside] != b[inside]).any(axis=-1).sum()
    assert changed > 0
    for name in ("page_table", "lengths", "free", "free_count", "next_position"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


@pytest.mark.parametrize("name", ["h2o", "retention-global", "snapkv"])
def test_a_policys_state_stays_with_its_slots(name):
    before = evicted(name, decode_interval=4)
    state = before.policy_state
    assert state.slots or state.layer
    after = erased(before)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after.policy_state), strict=True):
        np.testing.assert_array_equal(a, b)
    masked = erased(before, "mask")
    start, stop = (np.array(bound)[None, :, None, None] for bound in zip(*SPANS, strict=True))
    positions = np.asarray(before.positions)
    stays = (positions >= 0) & ~((positions >= start) & (positions < stop))
    left = np.asarray(masked.positions) >= 0
    for key, array in slot_state(before).items():
        np.testing.assert_array_equal(np.asarray(slot_state(masked)[key])[left], array[stays])


def test_an_edited_cache_goes_on_evicting():
    policy = tiny.policy("snapkv", decode_interval=4)
    after = erased(evicted("snapkv", decode_interval=4))
    _, cache = kvjax.extend(
        tiny.model(), after, tiny.tokens(3)[:, :9], policy=policy, budget=HALF, interval=1
    )
    assert int(np.asarray(cache.lengths).max()) <= 24
    assert np.isfinite(np.asarray(cache.values)).all()
