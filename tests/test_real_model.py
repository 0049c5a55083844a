"""A trained model decodes from a quarter of its cache as a dense masked pass says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.policies.base import Remainder, Schedule
from tests import oracle

TEXT = (
    "The lighthouse of Skerry stands on a rock two miles from the harbour. Its keeper, Anna "
    "Lindqvist, has lit the lamp every evening for thirty one years. On the ninth of March a storm "
    "broke the western window, and the lamp went out for the first time in living memory. The "
    "code of the spare lamp room is 4817. Fishermen came with rope and glass before the morning."
)
QUESTION = " Question: What is the code of the spare lamp room? Answer: The code is"
STEPS = 8


def one_shot(name: str) -> kvjax.Policy:
    """A registered policy that evicts once, after prefill, and merges nothing."""
    return dataclasses.replace(kvjax.policy(name), schedule=Schedule(), remainder=Remainder())


NAMES = [
    name
    for name in kvjax.policy_names()
    # These need calibrated filters, a replay, trained modules.
    if name not in ("qfilters", "kvzip")
    and not name.startswith(("retention-", "indexmem"))
    and not name.endswith("+memory")
]


@pytest.fixture(scope="module")
def prefilled(default_model):
    model, tokenizer = default_model
    prompt, question = tokenizer.encode(TEXT), tokenizer.encode(QUESTION)
    policies = tuple(one_shot(name) for name in NAMES)
    _, cache, observed = kvjax.observe(model, [prompt], policies=policies)
    return prompt, question, cache, observed


@pytest.mark.parametrize("name", NAMES)
def test_a_quarter_of_the_cache_decodes_as_the_dense_mask_says(default_model, prefilled, name):
    model, _ = default_model
    prompt, question, full, observed = prefilled
    room = len(question) + STEPS
    budget = np.array([round(len(prompt) / 4)])
    capacity = len(prompt) + room  # one compiled decode step for all policies
    cache = kvjax.compress(
        model, full, observed, policy=one_shot(name), budget=budget, capacity=capacity
    )
    kept = np.asarray(cache.positions)[:, 0]
    logits, cache = kvjax.extend(model, cache, [question])
    answer = kvjax.generate(model, cache, logits, max_new_tokens=STEPS)
    sequence = np.array([*prompt, *question, *answer.tokens[0].tolist()])
    mask = oracle.masked(model, len(sequence), len(prompt), kept)
    dense = oracle.dense_logits(model, sequence, mask)
    start = len(prompt) + len(question) - 1
    np.testing.assert_array_equal(answer.tokens[0], dense[start : start + STEPS].argmax(axis=-1))
    np.testing.assert_allclose(logits[0], dense[start], atol=2e-3)
