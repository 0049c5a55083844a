"""Where a prompt is split, and that nothing of it is lost."""

from __future__ import annotations

import pytest

from eval import haystacks
from eval.prompt import Prompter, Template
from eval.tasks import TASKS
from tests.eval.fakes import WordTokenizer


def sample(prompter):
    return TASKS["needle"].make(haystacks.load("noise"), 300, 0.5, 0, prompter.count)


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
    start, end = prompt.needle
    assert tokenizer.decode(prompt.prefill[start:end]).strip() == item.metadata["needle"]


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
