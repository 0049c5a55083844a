"""Similarity of code against longest common subsequences and n-grams by hand."""

from __future__ import annotations

import math
import random

import pytest

from eval.metrics.code import bleu, edit_similarity, function_found


def common_length(a: str, b: str) -> int:
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return common_length(a[:-1], b[:-1]) + 1
    return max(common_length(a[:-1], b), common_length(a, b[:-1]))


def test_edit_similarity_is_twice_the_common_subsequence_over_both_lengths():
    for seed in range(50):
        rng = random.Random(seed)
        a, b = ("".join(rng.choices("ab(", k=rng.randint(1, 8))) for _ in range(2))
        ratio = 2 * common_length(a, b) / (len(a) + len(b))
        assert edit_similarity(a, b) == round(100 * ratio) / 100


def test_first_line_without_comments_and_fences_is_compared():
    reply = "\n```python\n# a comment\nx = 1 // 2\nreturn x\nreturn y"
    assert edit_similarity(reply, "return x") == 1
    assert edit_similarity("```", "return x") == 0
    assert edit_similarity("", "") == 1


def test_bleu_is_the_geometric_mean_of_the_four_precisions():
    # 8 words, the last of another: 7/8, 6/7, 5/6 and 4/5 of the n-grams, and equal lengths.
    a, b = list("abcdefgh"), list("abcdefgx")
    expected = math.prod([7 / 8, 6 / 7, 5 / 6, 4 / 5]) ** 0.25
    assert bleu(" ".join(b), "\n".join(a)) == pytest.approx(expected)
    assert bleu("a b c d e", "a b c d e") == pytest.approx(1)


FUNCTIONS = {
    "add": "def add(a, b):\n    total = a + b\n    return total",
    "sub": "def sub(a, b):\n    total = a - b\n    return total",
}


def test_a_function_is_found_where_it_is_the_most_alike():
    reply = f"Here it is:\n```python\n{FUNCTIONS['add']}\n```\nIt adds."
    assert function_found(reply, "add", FUNCTIONS) == 1
    assert function_found(reply, "sub", FUNCTIONS) == 0
    assert function_found(FUNCTIONS["sub"], "sub", FUNCTIONS) == 1


def test_a_function_is_not_found_where_it_is_too_unlike():
    assert function_found("def add(a, b): return a + b", "add", FUNCTIONS) == 0
    assert function_found("", "add", FUNCTIONS) == 0
