"""Every method against its definition, written out over a whole text in NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from tests import tiny
from tests.erasing import by_hand
from tests.erasing.setting import (
    SPANS,
    check,
    erased,
    eraser,
    row_tokens,
    rows_of,
    whole,
    without,
)

ROWS = range(3)
AT_THE_ENDS = {"start": ((0, 6), (0, 1), (0, 3)), "end": ((40, 48), (30, 31), (4, 7))}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


def mask_of(length: int, *spans: tuple[int, int]) -> np.ndarray:
    place = np.arange(length)
    return np.any([(place >= start) & (place < stop) for start, stop in spans], axis=0)


def steered(row: int, *spans: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values with each span's from an adapted pass over what stands before it."""
    tokens = row_tokens(row)
    keys, values = whole(row).keys, whole(row).values
    for span in sorted(spans):
        inside = mask_of(len(tokens), span)
        found = by_hand.states(
            tiny.model(), tokens, eraser=eraser(), adapted=inside,
            kept=(keys, values, np.tile(~inside, (3, 1))),
        )  # fmt: skip
        keys = np.where(inside[None, None, :, None], found.keys, keys)
        values = np.where(inside[None, None, :, None], found.values, values)
    return keys, values


def shifted(row: int, *spans: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of no span, keys turned back by the erased tokens before them."""
    gone = mask_of(len(row_tokens(row)), *spans)
    back = -np.cumsum(gone)[~gone]
    return (
        by_hand.rotate(whole(row).keys[:, :, ~gone], back, tiny.model()),
        whole(row).values[:, :, ~gone],
    )


def repaired(
    row: int,
    spans: tuple[tuple[int, int], ...],
    again: np.ndarray,
    start: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Delete and shift, with the tokens of `again` ([T] or [L, T]) computed over the rest."""
    keys, values = shifted(row, *spans) if start is None else start
    tokens = without(row_tokens(row), spans)
    found = by_hand.states(
        tiny.model(), tokens, kept=(keys, values, ~np.broadcast_to(again, (3, len(tokens))))
    )
    return found.keys, found.values


@pytest.mark.parametrize("where", ["middle", "start", "end"])
def test_steering_states_are_those_of_an_adapted_pass_over_prefix_and_span(where):
    spans = AT_THE_ENDS.get(where, SPANS)
    after = erased("kveraser", rows_of(spans))
    for row in ROWS:
        check(after, row, *steered(row, spans[row]))


def test_several_spans_are_steered_from_left_to_right_over_the_edited_prefix():
    spans = [[(30, 40), (3, 9), (9, 12)], [(20, 25)], [(1, 2), (5, 7)]]
    after = erased("kveraser", spans)
    for row in ROWS:
        check(after, row, *steered(row, *spans[row]))


def test_masked_slots_are_gone_and_the_rest_is_where_it_was():
    after = erased("mask")
    for row in ROWS:
        stays = np.setdiff1d(np.arange(tiny.LENGTHS[row]), np.arange(*SPANS[row]))
        check(after, row, whole(row).keys, whole(row).values, held=lambda *_, at=stays: at)


@pytest.mark.parametrize("where", ["middle", "start", "end"])
def test_delete_and_shift_turns_the_keys_behind_the_span(where):
    spans = AT_THE_ENDS.get(where, SPANS)
    after = erased("delete-and-shift", rows_of(spans))
    for row in ROWS:
        check(after, row, *shifted(row, spans[row]))


@pytest.mark.parametrize("where", ["middle", "start", "end"])
def test_full_recomputation_is_a_prefill_without_the_span(where):
    spans = AT_THE_ENDS.get(where, SPANS)
    after = erased("recompute", rows_of(spans))
    for row in ROWS:
        plain = by_hand.states(tiny.model(), without(row_tokens(row), [spans[row]]))
        check(after, row, plain.keys, plain.values)


def test_full_recomputation_of_several_spans():
    spans = [[(30, 40), (3, 9), (9, 12)], [(20, 25)], [(1, 2), (5, 7)]]
    after = erased("recompute", spans)
    for row in ROWS:
        plain = by_hand.states(tiny.model(), without(row_tokens(row), spans[row]))
        check(after, row, plain.keys, plain.values)


@pytest.mark.parametrize("tokens", [1, 3])
def test_local_repair_computes_the_first_tokens_behind_the_span(tokens):
    after = erased("local-repair", tokens=tokens)
    for row in ROWS:
        start, stop = SPANS[row]
        again = mask_of(tiny.LENGTHS[row] - (stop - start), (start, start + tokens))
        check(after, row, *repaired(row, (SPANS[row],), again))


def test_local_repair_behind_each_of_several_spans():
    spans = [[(3, 9), (12, 20)], [(20, 25)], [(1, 2), (5, 7)]]
    after = erased("local-repair", spans, tokens=2)
    starts = [[3, 6], [20], [1, 4]]
    for row in ROWS:
        length = len(without(row_tokens(row), spans[row]))
        again = mask_of(length, *((start, start + 2) for start in starts[row]))
        check(after, row, *repaired(row, tuple(spans[row]), again))


def chosen_of(scores: np.ndarray, suffix: np.ndarray, count: int) -> np.ndarray:
    order = sorted(suffix, key=lambda at: (-scores[at], at))
    return np.isin(np.arange(len(scores)), order[:count])


def deviation(new, old, layer: int) -> np.ndarray:
    return sum(((a[layer] - b[layer]) ** 2).sum(axis=(0, 2)) for a, b in zip(new, old, strict=True))


@pytest.mark.parametrize(("fraction", "layer"), [(0.2, 1), (0.34, 2), (1.0, 1)])
def test_cacheblend_computes_the_tokens_that_deviate_most(fraction, layer):
    after = erased("cacheblend", fraction=fraction, check_layer=layer)
    for row in ROWS:
        start = SPANS[row][0]
        plain = by_hand.states(tiny.model(), without(row_tokens(row), [SPANS[row]]))
        stale = shifted(row, SPANS[row])
        length = plain.keys.shape[2]
        early = (np.arange(3) <= layer)[:, None, None, None]
        spliced = tuple(np.where(early, a, b) for a, b in zip(plain[:2], stale, strict=True))
        scores = deviation(plain[:2], stale, layer)
        suffix = np.arange(start, length)
        again = chosen_of(scores, suffix, int(np.round(fraction * len(suffix))))
        check(after, row, *repaired(row, (SPANS[row],), again, start=spliced))


@pytest.mark.parametrize(
    ("options", "reach"), [({}, 99), ({"rank_by": "attention"}, 99), ({"reach": 6}, 6)]
)
def test_the_hybrid_computes_suffix_tokens_over_the_steering_states(options, reach):
    layer = 1
    after = erased("hybrid", tokens=3, check_layer=layer, **options)
    for row in ROWS:
        tokens, span = row_tokens(row), SPANS[row]
        keys, values = steered(row, span)
        suffix = np.arange(span[1], len(tokens))[:reach]
        behind = np.isin(np.arange(len(tokens)), suffix)
        if options.get("rank_by") == "attention":
            scores = whole(row).attention[layer][:, :, span[0] : span[1]].sum(axis=(0, 2))
        else:
            fresh = by_hand.states(
                tiny.model(), tokens, kept=(keys, values, np.tile(~behind, (3, 1)))
            )
            scores = deviation(fresh[:2], (keys, values), layer)
        again = chosen_of(scores, suffix, 3)
        found = by_hand.states(tiny.model(), tokens, kept=(keys, values, np.tile(~again, (3, 1))))
        check(after, row, found.keys, found.values)


def test_the_hybrid_with_several_spans_leaves_their_slots_to_the_eraser():
    spans = [[(3, 9), (12, 20)], [(20, 25)], [(1, 2), (5, 7)]]
    after = erased("hybrid", spans, tokens=64, reach=None)
    for row in ROWS:
        tokens = row_tokens(row)
        keys, values = steered(row, *spans[row])
        first = min(start for start, _ in spans[row])
        again = (np.arange(len(tokens)) >= first) & ~mask_of(len(tokens), *spans[row])
        found = by_hand.states(tiny.model(), tokens, kept=(keys, values, np.tile(~again, (3, 1))))
        check(after, row, found.keys, found.values)


def test_a_note_is_appended_to_the_unedited_cache():
    note = (5, 6, 7)
    after = erased("note", note=note)
    for row in ROWS:
        plain = by_hand.states(tiny.model(), np.concatenate([row_tokens(row), note]))
        check(after, row, plain.keys, plain.values)
    for found, before in zip(
        jax.tree.leaves(erased("none")), jax.tree.leaves(tiny.full()[1]), strict=True
    ):
        np.testing.assert_array_equal(found, before)


def test_the_next_question_is_answered_over_the_edited_cache():
    """After full recomputation the question continues the text without the span."""
    question = tiny.tokens(3)[:, :5]
    after = erased("recompute")
    logits, _ = kvjax.extend(tiny.model(), after, question)
    for row in ROWS:
        text = np.concatenate([without(row_tokens(row), [SPANS[row]]), question[row]])
        wanted = by_hand.states(tiny.model(), text).logits[-1]
        np.testing.assert_allclose(logits[row], wanted, atol=1e-3)
