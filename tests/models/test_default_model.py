"""The embedded default model answers, and its tokenizer agrees with the exported one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.checkpoint import load
from kvjax.models.orbax import export_hf
from kvjax.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import MESSAGES, TEXTS
from tests.oracle import causal

pytestmark = pytest.mark.model


@jax.jit
def next_token(model, tokens, length, masks):
    """The greedy next token of one padded sequence, by dense attention."""
    cos, sin = model.rotation(jnp.arange(tokens.shape[1])[None])
    scale = np.float32(model.config.head_dim**-0.5)

    def body(x, inputs):
        layer, mask = inputs
        new = layer.project(x, cos, sin)
        keys, values = (
            jnp.repeat(a, model.config.group_size, axis=1) for a in (new.keys, new.values)
        )
        weights = jnp.einsum("bhtd,bhsd->bhts", new.queries, keys) * scale
        weights = jax.nn.softmax(jnp.where(mask[:1][None], weights, -1e30), axis=-1)
        return layer.finish(x, jnp.einsum("bhts,bhsd->bhtd", weights, values)), None

    x, _ = jax.lax.scan(body, model.embed(tokens), (model.layers, masks))
    return jnp.argmax(model.logits(x[0, length - 1]))


def test_the_capital_of_france(default_model):
    model, tokenizer = default_model
    ids = tokenizer.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
    masks = jnp.asarray(causal(model, 64))
    stream, answer = tokenizer.stream(), ""
    while len(ids) < 64:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        token = int(next_token(model, padded, len(ids), masks))
        if token in tokenizer.end_tokens:
            break
        ids.append(token)
        answer += stream.push(token)
    assert answer + stream.flush() == "The capital of France is Paris."


def test_the_configuration_is_that_of_smollm2(default_model):
    config = default_model.model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert config.rope.theta == 1e5 and config.norm_eps == 1e-5 and config.tie_embeddings
    assert default_model.tokenizer.end_tokens == {0, 2}


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(default_model, text):
    tokenizer = default_model.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(stream.push(token) for token in ids) + stream.flush() == text


def test_digits_are_encoded_one_by_one(default_model):
    tokenizer = default_model.tokenizer
    assert [tokenizer.decode([token]) for token in tokenizer.encode("1234567")] == list("1234567")


def test_the_tokenizer_from_metadata_agrees_with_the_exported_one(default_model, tmp_path):
    tokenizer = default_model.tokenizer
    tokenizer.save(tmp_path)
    exported = Tokenizer.from_directory(tmp_path)
    for text in TEXTS:
        assert exported.encode(text) == tokenizer.encode(text)
    assert exported.chat(MESSAGES) == tokenizer.chat(MESSAGES)
    assert exported.end_tokens == tokenizer.end_tokens
    assert exported.fingerprint == tokenizer.fingerprint


@pytest.mark.slow
def test_the_exported_directory_loads_equal_to_the_gguf(default_model, tmp_path):
    model, tokenizer = default_model
    loaded = load(export_hf(model, tokenizer, tmp_path / "model"))
    assert loaded.model.fingerprint() == model.fingerprint()
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(loaded.model.parameters[name], value, err_msg=name)
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
