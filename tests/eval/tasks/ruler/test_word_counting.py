"""Common and frequent words, against counting them."""

from __future__ import annotations

import re
from collections import Counter

import pytest


def listed(text: str) -> list[str]:
    entries = re.findall(r"(\d+)\. ([a-z]+)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


@pytest.mark.parametrize(
    ("length", "common", "other"),
    [(1024, 6, 1), (4095, 6, 1), (4096, 30, 3), (8192, 30, 3), (131072, 30, 3)],
)
def test_ten_common_words_are_in_the_list_as_often_as_ruler_says(make, length, common, other):
    for seed in range(3):
        sample = make("cwe", length, seed)
        counts = Counter(listed(sample.context.rsplit("\n", 1)[1]))
        assert {w for w, n in counts.items() if n == common} == set(sample.answers)
        assert len(sample.answers) == 10
        assert {n for w, n in counts.items() if w not in sample.answers} == {other}


@pytest.mark.parametrize(
    ("length", "different", "common", "other"), [(1024, 20, 3, 1), (4096, 40, 10, 3)]
)
def test_the_example_is_solved(make, length, different, common, other):
    text, asked = make("cwe", length).context.split("\n")[1:3]
    counts = Counter(listed(text))
    question, solution = asked.split(" Answer: The top 10 words that appear most often")
    assert question == "Question: What are the 10 most common words in the above list?"
    answers = listed(solution)
    assert {w for w, n in counts.items() if n == common} == set(answers) and len(answers) == 10
    assert {n for w, n in counts.items() if w not in answers} == {other}
    assert len(counts) == different


def test_a_length_beyond_the_words_there_are_is_refused(make):
    with pytest.raises(ValueError, match=r"^length=4000000: too long for ruler/cwe, .* <= \d+$"):
        make("cwe", 4_000_000)


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192])
def test_coded_words_follow_the_zeta_distribution(make, length):
    for seed in range(3):
        sample = make("fwe", length, seed)
        text = sample.context.split("coded words. ", 1)[1]
        (dots, noise), *counts = Counter(text.split()).most_common()
        assert dots == "..."
        assert [word for word, _ in counts[:3]] == list(sample.answers)
        assert counts[2][1] > counts[3][1]
        for rank, (word, number) in enumerate(counts, 2):
            assert re.fullmatch("[a-z]{6}", word)
            assert number == pytest.approx(noise / rank**2, abs=1.5)
        assert len(counts) < length // 50
