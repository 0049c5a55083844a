"""KVzip's replay against a dense pass over the context followed by the replayed tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.repetition import ReplayPrompt, compiled_replay
from tests import oracle

CONFIG = kvjax.ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_length=512,
)  # fmt: skip
PROMPT = ReplayPrompt(first=(3, 5, 7), later=(11, 13), suffix=(17,))


@pytest.fixture(scope="module")
def model():
    return kvjax.Decoder.random(CONFIG, jax.random.key(2))


def attention_weights(model, tokens):
    """Dense causal logits q k^T / sqrt(D) of every layer: [L, H, T, T]."""
    cos, sin = model.rotation(jnp.arange(len(tokens))[None])
    mask = jnp.asarray(oracle.causal(model, len(tokens)))
    x, group, found = model.embed(jnp.asarray(tokens)[None]), 2, []
    for index in range(CONFIG.num_layers):
        layer = jax.tree.map(lambda array, index=index: array[index], model.layers)
        new = layer.project(x, cos, sin)
        keys, values = (jnp.repeat(a, group, axis=1)[0] for a in (new.keys, new.values))
        logits = jnp.einsum("hqd,hsd->hqs", new.queries[0], keys) / np.float32(8**0.5)
        found.append(np.asarray(logits))
        seen = jnp.where(jnp.repeat(mask[index], group, axis=0), logits, -jnp.inf)
        out = jnp.einsum("hqs,hsd->hqd", jax.nn.softmax(seen, axis=-1), values)
        x = layer.finish(x, out[None])
    return np.stack(found)


def replay_by_hand(model, context, chunk, first_tokens=4):
    length, scores = len(context), np.zeros((CONFIG.num_layers, 2, len(context)))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        before = PROMPT.first
        if start:
            before = (*PROMPT.later, *context[start - 8 : start], *PROMPT.suffix)
        fed = [*before, *context[start:end]]
        logits = attention_weights(model, np.array([*context, *fed]))
        for query in range(length, length + len(fed)):
            keys = sorted({*range(first_tokens), *range(start, end)})
            keys += list(range(length, query + 1))
            weights = np.exp(logits[:, :, query][:, :, keys])
            weights /= weights.sum(axis=-1, keepdims=True)
            for place, key in enumerate(keys):
                if start <= key < end:
                    best = weights[:, :, place].reshape(CONFIG.num_layers, 2, 2).max(axis=2)
                    scores[:, :, key] = np.maximum(scores[:, :, key], best)
    return scores


def test_replay_scores_are_the_largest_attention_of_a_repetition(model):
    rng = np.random.default_rng(0)
    rows = [rng.integers(20, 97, length) for length in (30, 21)]
    tokens = np.zeros((2, 30), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    lengths = jnp.asarray([30, 21], jnp.int32)
    _, cache, _ = kvjax.observe(model, tokens, lengths)
    found = compiled_replay(model, cache, jnp.asarray(tokens), lengths, PROMPT, chunk=12)
    for index, row in enumerate(rows):
        expected = replay_by_hand(model, row.tolist(), 12)
        np.testing.assert_allclose(found[:, index, :, : len(row)], expected, atol=2e-5)


def test_kvzip_keeps_what_the_replay_looked_at(model):
    tokens = np.random.default_rng(1).integers(20, 97, (1, 24)).astype(np.int32)
    policy = kvjax.policy("kvzip", uniform=True)
    _, cache, observed = kvjax.observe(model, tokens, policies=(policy,))
    scores = jax.random.uniform(jax.random.key(0), cache.positions.shape)
    observed = dataclasses.replace(observed, replay_scores=scores)
    kept = kvjax.compress(model, cache, observed, policy=policy, budget=8)
    order = np.argsort(-np.asarray(scores)[:, :, :, 4:], axis=-1)[..., :4] + 4
    expected = np.sort(np.concatenate([np.broadcast_to(np.arange(4), order.shape), order], -1), -1)
    np.testing.assert_array_equal(kept.positions, expected)


def test_a_prefill_cannot_replay(model):
    with pytest.raises(ValueError, match="'kvzip' replays the whole context"):
        kvjax.prefill(model, [[1, 2, 3]], policy="kvzip", budget=2)


def test_compressing_without_a_replay_says_what_is_missing(model):
    policy = kvjax.policy("kvzip")
    _, cache, observed = kvjax.observe(model, [[1, 2, 3]], policies=(policy,))
    with pytest.raises(ValueError, match="needs replay_scores"):
        kvjax.compress(model, cache, observed, policy=policy, budget=2)
