"""The modules that ship are whole, belong to the default model, and serve under their names."""

from __future__ import annotations

import pytest

import kvjax
from eval import haystacks
from eval.prompt import Prompter
from eval.tasks import TASKS
from eval.tasks.base import Request
from kvjax.learned import modules

LARGEST = 12 * 10**6
SHIPPED = sorted(path.parent for path in modules.SHIPPED.glob(f"*/{modules.CARD_FILE}"))


def test_there_are_some():
    assert "retention-global" in [modules.read_card(path).module for path in SHIPPED]


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_a_card_says_where_its_module_comes_from_and_what_it_scores(directory):
    card = modules.read_card(directory)
    assert card.module in kvjax.policy_names()
    assert card.training["steps"] > 0 and card.training["data"]
    assert card.scores
    assert sum(file.stat().st_size for file in directory.iterdir()) <= LARGEST


@pytest.mark.model
@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_a_policy_by_name_finds_a_needle_in_a_quarter_of_the_cache(default_model, directory):
    model, tokenizer = default_model
    name = modules.read_card(directory).module
    policy = kvjax.policy(name, decode_interval=0)
    params = kvjax.policy_params(model, policy)
    prompter = Prompter(tokenizer)
    sample = TASKS["needle"].make(
        Request(
            subset="",
            haystack=haystacks.load("prose"),
            length=600,
            depth=0.5,
            seed=1,
            count_tokens=prompter.count,
        )
    )
    prompt = prompter.prompt(sample)
    room = len(prompt.question) + 16
    _, cache = kvjax.prefill(
        model, [prompt.prefill], policy=policy, budget=0.25, room=room, params=params
    )
    logits, cache = kvjax.extend(model, cache, [prompt.question])
    answer = kvjax.generate(model, cache, logits, max_new_tokens=16)
    assert sample.answers[0] in tokenizer.decode(answer.tokens[0].tolist())
