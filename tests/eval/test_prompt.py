"""Where a prompt is split, and that nothing of it is lost."""

from __future__ import annotations

import dataclasses

import pytest

from eval import haystacks
from eval.prompt import Prompter, Template
from eval.tasks import TASKS
from eval.tasks.base import Request
from tests.eval.fakes import WordTokenizer


def sample(prompter):
    request = Request(
        subset="",
        haystack=haystacks.load("noise"),
        length=300,
        depth=0.5,
        seed=0,
        count_tokens=prompter.count,
    )
    return TASKS["needle"].make(request)


def test_the_two_parts_join_to_the_rendered_template():
    tokenizer = WordTokenizer()
    prompter = Prompter(tokenizer)
    item = sample(prompter)
    prompt = prompter.prompt(item)
    user = f"{item.context}\n{item.question}"
    rendered = tokenizer.chat([{"role": "user", "content": user}]) + item.answer_prefix
    assert tokenizer.decode(prompt.prefill + prompt.question) == rendered


def test_hidden_keeps_the_question_out_of_the_prefill_and_seen_puts_it_in():
    tokenizer = WordTokenizer()
    item = sample(Prompter(tokenizer))
    hidden = Prompter(tokenizer, "hidden").prompt(item)
    seen = Prompter(tokenizer, "seen").prompt(item)
    assert "What is the special" not in tokenizer.decode(hidden.prefill)
    assert seen.prefill == hidden.prefill + hidden.question and seen.question == []


def test_the_needle_is_where_the_prompt_says():
    tokenizer = WordTokenizer()
    prompter = Prompter(tokenizer)
    item = sample(prompter)
    prompt = prompter.prompt(item)
    ((start, end),) = prompt.needles
    assert tokenizer.decode(prompt.prefill[start:end]).strip() == item.metadata["needle"]


@pytest.mark.parametrize("protocol", ["hidden", "seen"])
def test_a_long_context_loses_its_middle_and_nothing_else(protocol):
    tokenizer = WordTokenizer()
    prompter = Prompter(tokenizer, protocol)
    item = sample(prompter)
    whole = Prompter(tokenizer).prompt(item)
    length = len(whole.prefill)
    assert prompter.prompt(item, length).cut == 0
    cut = prompter.prompt(item, length - 101)
    assert cut.cut == 101 and cut.needles == ()
    left = length - 101
    first, last = left - left // 2, left // 2
    joined = cut.prefill + cut.question
    assert joined == whole.prefill[:first] + whole.prefill[-last:] + whole.question


def test_a_limit_that_leaves_no_context_is_refused():
    prompter = Prompter(WordTokenizer())
    with pytest.raises(ValueError, match=r"its question of \d+ tokens and its answer leave no"):
        prompter.prompt(sample(prompter), 0)


def test_plain_samples_get_no_template():
    tokenizer = WordTokenizer()
    item = dataclasses.replace(sample(Prompter(tokenizer)), chat=False)
    prompt = Prompter(tokenizer).prompt(item)
    assert tokenizer.decode(prompt.prefill) == item.context
    assert tokenizer.decode(prompt.question) == f"\n{item.question}{item.answer_prefix}"


@pytest.mark.parametrize(
    ("render", "message"),
    [
        (lambda text: "no user", "occurs 0 times"),
        (lambda text: text + text, "occurs 2 times"),
        (lambda text: text.upper(), "rewrites"),
    ],
)
def test_a_template_that_changes_the_text_is_refused(render, message):
    tokenizer = WordTokenizer()
    tokenizer.chat = lambda messages, add_generation_prompt: render(messages[0]["content"])
    with pytest.raises(ValueError, match=message):
        Template.of(tokenizer)


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match="question='shown': allowed are hidden, seen"):
        Prompter(WordTokenizer(), "shown")
