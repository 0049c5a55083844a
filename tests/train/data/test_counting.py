"""Counting by words is counting."""

from __future__ import annotations

import pytest

from eval import haystacks
from eval.prompt import Prompter
from eval.tasks import TASKS
from eval.tasks.base import Request
from tests.train.data.tokens import StableTokenizer
from train.data import counting


class Pairs(StableTokenizer):
    """Takes two characters at a time: the tokens of a text are not those of its words."""

    def encode(self, text, add_special_tokens=False):
        return super().encode(" ".join("a" for _ in range(len(text) // 2)))


def sample(prompter, subset="niah_multivalue", length=600):
    request = Request(
        subset=subset,
        haystack=haystacks.load("prose"),
        length=length,
        depth=None,
        seed=3,
        count_tokens=prompter.count,
    )
    return TASKS["ruler"].make(request)


def test_words_are_counted_once():
    calls = []

    def encode(text):
        calls.append(text)
        return list(text)

    count = counting.word_counter(encode)
    text = "one two  two\n\n three one. one"
    assert count(text) == len(text) == count(text)
    assert len(calls) == len(set(calls)) < 9


def test_prompts_are_counted_as_evaluation_counts_them():
    prompter = Prompter(StableTokenizer())
    made = sample(prompter)
    text = (made.context, made.question, made.answer_prefix)
    count = counting.prompt_counter(prompter, [made])
    assert count != prompter.count
    assert count(*text) == prompter.count(*text)


def test_a_tokenizer_that_does_not_split_at_spaces_is_asked_for_the_whole():
    prompter = Prompter(Pairs())
    made = sample(Prompter(StableTokenizer()))
    assert counting.prompt_counter(prompter, [made]) == prompter.count


@pytest.mark.parametrize("subset", ["niah_multivalue", "niah_multikey_3", "vt", "cwe"])
def test_the_default_models_words_are_counted_right(default_model, subset):
    prompter = Prompter(default_model.tokenizer)
    made = sample(prompter, subset, 900)
    text = (made.context, made.question, made.answer_prefix)
    count = counting.prompt_counter(prompter, [made])
    assert count != prompter.count
    assert count(*text) == prompter.count(*text)
