"""Erasing in models of every kind: query and key norms, biases, scaled RoPE, sliding windows."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.learned.eraser import Eraser, EraserConfig, init_eraser
from tests import tiny
from tests.erasing import by_hand
from tests.erasing.setting import check
from tests.models.small import CONFIGS, random_model

LENGTH, SPAN = 40, (11, 19)
INSIDE = np.isin(np.arange(LENGTH), np.arange(*SPAN))
TOKENS = np.random.default_rng(4).integers(0, 300, LENGTH).astype(np.int32)
FAMILIES = ["qwen3", "llama3", "mistral", "biased"]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


@functools.cache
def before(name: str) -> kvjax.PaddedCache:
    return kvjax.prefill(random_model(name), TOKENS[None], room=8)[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_steering(name):
    model = random_model(name)
    made = init_eraser(EraserConfig(rank=4), jax.random.key(1), CONFIGS[name])
    adapters = Eraser(
        config=made.config, arrays={key: array + 0.05 for key, array in made.arrays.items()}
    )
    after = kvjax.erase(model, adapters, before(name), TOKENS[None], SPAN)
    whole = by_hand.states(model, TOKENS)
    wanted = by_hand.states(
        model, TOKENS, eraser=adapters, adapted=INSIDE,
        kept=(whole.keys, whole.values, np.tile(~INSIDE, (3, 1))),
    )  # fmt: skip
    assert np.abs(wanted.values - whole.values)[:, :, INSIDE].max() > 0.1
    keys, values = (
        np.where(INSIDE[None, None, :, None], new, old)
        for new, old in zip(wanted[:2], whole[:2], strict=True)
    )
    check(after, 0, keys, values)


@pytest.mark.parametrize("name", FAMILIES)
def test_moving_and_recomputing_the_suffix(name):
    model, rest = random_model(name), TOKENS[~INSIDE]
    whole, exact = by_hand.states(model, TOKENS), by_hand.states(model, rest)
    back = -np.cumsum(INSIDE)[~INSIDE]
    moved = kvjax.erase(
        model, None, before(name), TOKENS[None], SPAN, method="delete-and-shift"
    )  # fmt: skip
    keys = by_hand.rotate(whole.keys[:, :, ~INSIDE], back, model)
    check(moved, 0, keys, whole.values[:, :, ~INSIDE])
    np.testing.assert_allclose(keys[0], exact.keys[0], atol=1e-6)  # the sign of the rotation
    again = kvjax.erase(model, None, before(name), TOKENS[None], SPAN, method="recompute")
    check(again, 0, exact.keys, exact.values)
