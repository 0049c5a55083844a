"""ROUGE-L against a search over all subsequences and values of the official package."""

from __future__ import annotations

import itertools
import random

import pytest

from eval.metrics.rouge import rouge_l, rouge_l_chinese, rouge_lsum


@pytest.mark.parametrize(
    ("reply", "answer", "official"),
    [
        ("The cat sat on the mat.", "The cat is on the mat.", 0.833333328333),
        (
            "The committee agreed to raise the budget. Members will meet again in May. The chair "
            "thanked the staff for the report.",
            "The committee raised the budget by five percent. The members meet in May. The staff "
            "was thanked.",
            0.4848,
        ),
        (
            "the the the the report was good and the report was long",
            "the report was long and the staff was good",
            0.6154,
        ),
        ("", "text", 0),
        ("...", "text", 0),
    ],
)
def test_rouge_l_is_that_of_the_official_package(reply, answer, official):
    # Numbers of the package rouge 1.0.1: Rouge().get_scores(...)["rouge-l"]["f"].
    assert rouge_l(reply, [answer]) == pytest.approx(official, abs=5e-5)


def longest_common(a: list[str], b: list[str]) -> set[tuple[str, ...]]:
    """All longest common subsequences, found by trying every subsequence of `a`."""

    def within(part):
        rest = iter(b)
        return all(word in rest for word in part)

    for n in range(len(a), -1, -1):
        found = {part for part in itertools.combinations(a, n) if within(part)}
        if found:
            return found
    return set()


def test_one_sentence_counts_the_distinct_words_of_a_longest_common_subsequence():
    for seed in range(200):
        rng = random.Random(seed)
        a, b = (rng.choices("pqrst", k=rng.randint(1, 7)) for _ in range(2))
        possible = set()
        for part in longest_common(b, a):
            p, r = len(set(part)) / len(set(a)), len(set(part)) / len(set(b))
            possible.add(round(2 * p * r / (p + r + 1e-8), 9))
        assert round(rouge_l(" ".join(a), [" ".join(b)]), 9) in possible


def test_sentences_contribute_the_union_of_their_words():
    # Sentence by sentence: {w1, w2} and {w1, w3, w5} of w1 .. w5 (Lin 2004, section 3.2), and a
    # reply of 9 distinct words: P = 4/8, R = 4/5.
    found = rouge_l("w1 w2 w6 w7 w8.w1 w3 w8 w9 w5", ["w1 w2 w3 w4 w5"])
    assert found == pytest.approx(2 * 0.5 * 0.8 / 1.3)


def test_long_sentences_do_not_meet_a_recursion_limit():
    text = " ".join(f"w{i}" for i in range(1500))
    assert rouge_l(text, [text]) == pytest.approx(1)


def test_chinese_is_cut_into_words():
    # 我, 来到, 北京 and 我, 去, 北京.
    assert rouge_l_chinese("我来到北京", ["我去北京"]) == pytest.approx(2 / 3, abs=1e-6)


def test_rouge_lsum_takes_lines_as_sentences_and_ignores_case():
    assert rouge_lsum("The cat\nsat down", ["sat down\nthe CAT"]) == pytest.approx(1)
    # One common word of two and of four.
    assert rouge_lsum("red cat", ["blue cat runs fast"]) == pytest.approx(1 / 3)
    assert rouge_lsum("", ["text"]) == 0
