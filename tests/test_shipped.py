"""The modules that ship are whole, belong to the default model, and serve under their names."""

from __future__ import annotations

import pytest

import kvjax
from eval import haystacks
from eval.config import PolicyConfig
from eval.erasing import measure, run, suites
from eval.prompt import Prompter
from eval.tasks import TASKS
from eval.tasks.base import Request
from kvjax.learned import eraser, modules

LARGEST = 12 * 10**6
SHIPPED = sorted(path.parent for path in modules.SHIPPED.glob(f"*/{modules.CARD_FILE}"))
POLICIES = [path for path in SHIPPED if modules.read_card(path).kind != eraser.KIND]
ERASERS = [path for path in SHIPPED if path not in POLICIES]


def test_there_are_some():
    assert "retention-global" in [modules.read_card(path).module for path in SHIPPED]
    assert ERASERS


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda path: path.name)
def test_a_card_says_where_its_module_comes_from_and_what_it_scores(directory):
    card = modules.read_card(directory)
    assert card.module in (kvjax.policy_names() if directory in POLICIES else [eraser.MODULE])
    assert card.training["steps"] > 0 and card.training["data"]
    assert card.scores
    assert sum(file.stat().st_size for file in directory.iterdir()) <= LARGEST


@pytest.mark.model
@pytest.mark.parametrize("directory", POLICIES, ids=lambda path: path.name)
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
    given = {"policy": policy, "params": params}
    _, cache = kvjax.prefill(model, [prompt.prefill], budget=0.25, room=room, **given)
    logits, cache = kvjax.extend(model, cache, [prompt.question], **given)
    answer = kvjax.generate(model, cache, logits, max_new_tokens=16, **given)
    assert sample.answers[0] in tokenizer.decode(answer.tokens[0].tolist())


@pytest.mark.model
@pytest.mark.parametrize("directory", ERASERS, ids=lambda path: path.name)
def test_an_eraser_is_nearer_to_recomputation_than_masking(default_model, directory):
    """Stops of a line with others put between them: the text behind knows which came before."""
    model, tokenizer = default_model
    trained = kvjax.load_eraser(model, directory)
    texts = {"haystack": haystacks.load("prose"), "inserted": haystacks.load("sentences")}
    requests = [
        suites.ErasingRequest(
            suite="order", length=200, span_tokens=40, seed=10_000 + seed, count_tokens=len, **texts
        )
        for seed in range(4)
    ]
    samples = [run.made(request, tokenizer) for request in requests]
    methods = measure.labelled([PolicyConfig(name="mask"), PolicyConfig(name="kveraser")])
    found = measure.measure((model, tokenizer), trained, methods, samples, 8)
    kl = {
        method: sum(one.kl for row in found for one in row if one.method == method)
        for method in methods
    }
    assert kl["kveraser"] < 0.7 * kl["mask"] < kl["mask"] < kl["none"]
