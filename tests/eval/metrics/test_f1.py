"""F1 against counting by hand."""

from __future__ import annotations

import pytest

from eval.metrics.f1 import (
    f1,
    f1_chinese_characters,
    f1_chinese_words,
    normalised,
    normalised_chinese,
    token_f1,
)


def brute_force(reply: list[str], answer: list[str]) -> float:
    """Pairs tokens off one by one; F1 is twice the pairs over all tokens."""
    left, pairs = list(answer), 0
    for token in reply:
        if token in left:
            left.remove(token)
            pairs += 1
    return 2 * pairs / (len(reply) + len(answer)) if pairs else 0.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [("a b c", "b c d"), ("a a a", "a"), ("x", "y"), ("", "y"), ("x", ""), ("a b a", "a a b")],
)
def test_token_f1_is_twice_the_pairs_over_all_tokens(reply, answer):
    reply, answer = reply.split(), answer.split()
    assert token_f1(reply, answer) == pytest.approx(brute_force(reply, answer))


def test_case_punctuation_articles_and_spaces_do_not_count():
    assert normalised("The  quick, (brown) fox; an a the.") == "quick brown fox"
    assert f1("The fox.", ["a FOX"]) == 1


def test_the_best_answer_counts():
    # Two of three words found, two of two asked for: P = 2/3, R = 1.
    assert f1("red green blue", ["yellow", "green red"]) == pytest.approx(0.8)
    assert f1("red", []) == 0


def test_chinese_text_loses_both_kinds_of_punctuation():
    assert normalised_chinese("【红楼梦】， 是 Great.") == "红楼梦是great"
    assert normalised_chinese("《红楼梦》") == "《红楼梦"  # the official list lacks this one


def test_chinese_characters_are_tokens():
    # 北京 and 北京市: two of two found, two of three asked for.
    assert f1_chinese_characters("北京。", ["北京市"]) == pytest.approx(0.8)


def test_chinese_words_are_tokens():
    # jieba cuts 我来到北京清华大学 into 我, 来到, 北京, 清华大学.
    assert f1_chinese_words("北京清华大学", ["我来到北京清华大学"]) == pytest.approx(2 * 2 / 6)
    assert f1_chinese_words("清华", ["清华大学"]) == 0
