"""The likelihood of a continuation is that of its tokens one by one, whatever the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests import tiny

PROMPT, CONTINUATION = 20, 11


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 50, (2, PROMPT + CONTINUATION)).astype(np.int32)


def one_by_one(model, cache, logits, tokens):
    """log p of every token, each from the logits that extend returned for those before."""
    found = []
    for column in range(tokens.shape[1]):
        log_p = jax.nn.log_softmax(np.asarray(logits, np.float64))
        found.append(np.take_along_axis(log_p, tokens[:, column : column + 1], axis=1)[:, 0])
        logits, cache = kvjax.extend(model, cache, tokens[:, column : column + 1])
    return np.stack(found, axis=1)


@pytest.mark.parametrize("policy", ["full", "keydiff"])
@pytest.mark.parametrize("pages", [None, 4])
def test_it_is_that_of_the_tokens_one_by_one(model, tokens, policy, pages):
    prompt, continuation = tokens[:, :PROMPT], tokens[:, PROMPT:]
    logits, cache = kvjax.prefill(
        model, prompt, policy=policy, budget=0.5, room=CONTINUATION, pages=pages
    )
    found = kvjax.log_likelihood(model, cache, logits, continuation)
    np.testing.assert_allclose(
        found, one_by_one(model, cache, logits, continuation), rtol=2e-5, atol=2e-5
    )


def test_padding_is_zero_and_changes_nothing(model, tokens):
    prompt, continuation = tokens[:, :PROMPT], tokens[:, PROMPT:]
    logits, cache = kvjax.prefill(model, prompt, room=CONTINUATION)
    whole = kvjax.log_likelihood(model, cache, logits, continuation)
    part = kvjax.log_likelihood(model, cache, logits, continuation, np.array([4, CONTINUATION]))
    np.testing.assert_allclose(part[0, :4], whole[0, :4], rtol=1e-6)
    assert not np.any(part[0, 4:])
    np.testing.assert_allclose(part[1], whole[1], rtol=1e-6)


def test_more_than_a_block_of_positions_equals_one_whole_pass(model):
    tokens = np.random.default_rng(1).integers(0, 50, (1, 150)).astype(np.int32)
    logits, cache = kvjax.prefill(model, tokens[:, :1])
    found = kvjax.log_likelihood(model, cache, logits, tokens[:, 1:])
    early_logits, early = kvjax.prefill(model, tokens[:, :140])
    late = kvjax.log_likelihood(model, early, early_logits, tokens[:, 140:])
    np.testing.assert_allclose(found[:, 139:], late, rtol=2e-5, atol=2e-5)


def test_an_id_outside_the_vocabulary_is_named(model, tokens):
    logits, cache = kvjax.prefill(model, tokens[:, :PROMPT])
    with pytest.raises(ValueError, match="token id 100000"):
        kvjax.log_likelihood(model, cache, logits, jnp.full((2, 3), 100_000, jnp.int32))
