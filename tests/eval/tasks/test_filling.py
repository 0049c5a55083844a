"""Filling and placing, against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from eval.tasks import filling


@pytest.mark.parametrize("available", [None, 0, 3, 40])
def test_the_most_that_fits_is_what_trying_all_numbers_finds(available):
    rng = random.Random(0)
    for _ in range(200):
        costs = [rng.randint(1, 30) for _ in range(2000)]
        sums = [rng.randint(0, 60), *costs]
        totals = list(itertools.accumulate(sums))
        length = totals[0] + rng.randint(0, 900)
        expected = max(n for n, total in enumerate(totals) if total <= length)
        calls = []
        found = filling.most(lambda n, t=totals, c=calls: (c.append(n), t[n])[1], length, available)
        assert found == (expected if available is None else min(expected, available))
        assert len(calls) <= 16


def test_the_last_piece_is_cut_where_more_than_one_percent_is_missing():
    def count(pieces):
        return len("".join(pieces))

    kept = filling.fill(iter(["aaaa bbbb. "] * 99), count, 105, filling.sentence_cuts)
    assert kept == ["aaaa bbbb. "] * 9 + ["aaaa.\n"]
    kept = filling.fill(iter(["aaaa bbbb\n"] * 99), count, 108, filling.line_cuts)
    assert kept == ["aaaa bbbb\n"] * 10 + ["aaaa bb\n"]
    kept = filling.fill(iter(["aaaa bbbb\n"] * 99), count, 100, filling.line_cuts)
    assert kept == ["aaaa bbbb\n"] * 10


def test_inserted_texts_are_at_their_spans_and_everything_else_is_unchanged():
    rng = random.Random(1)
    for own_lines in (False, True):
        for _ in range(50):
            sentences = [rng.choice(["One. ", "Two.\n"]) for _ in range(rng.randint(0, 12))]
            at = filling.drawn_breaks(sentences, own_lines, 3, rng.getrandbits(32))
            assert at == sorted(at) and set(at) <= set(filling.breaks(sentences, own_lines))
            text, spans = filling.insert(sentences, ["<a>", "<b>", "<c>"], at, own_lines)
            assert [text[start:end] for start, end in spans] == ["<a>", "<b>", "<c>"]
            left = text.replace("<a>", "").replace("<b>", "").replace("<c>", "")
            assert "".join(left.split()) == "".join("".join(sentences).split())
            if own_lines:
                assert {"<a>", "<b>", "<c>"} <= set(text.split("\n"))


def test_lines_get_one_needle_each_and_any_of_them():
    sentences = ["One.\n"] * 6
    drawn = [filling.drawn_breaks(sentences, True, 3, seed) for seed in range(200)]
    assert all(len(set(at)) == 3 for at in drawn)
    assert {i for at in drawn for i in at} == set(range(6))
