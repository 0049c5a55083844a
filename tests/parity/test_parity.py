"""Logits equal those of PyTorch transformers, for every family, in prefill and cached decode."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kvjax import decoding
from kvjax.models.checkpoint import load
from kvjax.models.config import ModelConfig
from kvjax.policies.base import Policy, Protection
from tests.oracle import causal, dense_logits
from tests.parity import make_fixtures

TOLERANCE = 1e-4
NAMES = tuple(make_fixtures.CONFIGS)

prefill = jax.jit(decoding.prefill, static_argnames=("policy", "capacity"))
extend = jax.jit(decoding.extend)
FULL = Policy(name="full", scorer=None, protection=Protection(sinks=0))


def open_fixture(name):
    """Weights by checkpoint name, recorded arrays by short name, metadata."""
    with safe_open(make_fixtures.FIXTURES / f"{name}.safetensors", "numpy") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    recorded = {key.split("/")[1]: tensors.pop(key) for key in list(tensors) if "/" in key}
    return tensors, recorded, metadata


@pytest.fixture(params=NAMES, scope="module")
def recorded(request, tmp_path_factory):
    """The loaded model of a fixture and the arrays PyTorch recorded for it."""
    path = tmp_path_factory.mktemp(request.param)
    tensors, arrays, metadata = open_fixture(request.param)
    (path / "config.json").write_text(metadata["config"])
    save_file(tensors, path / "model.safetensors")
    return load(path, dtype=jnp.float32).model, arrays


def cached_logits(model, tokens, prefix):
    """Logits [B, T - prefix + 1, V] from the prefix's last token on, decoded with the cache."""
    batch, length = tokens.shape
    full = jnp.full((batch,), length, jnp.int32)
    # Right-padded with what comes later: none of it may reach the prefix.
    logits, cache = prefill(
        model,
        jnp.asarray(tokens),
        jnp.full((batch,), prefix, jnp.int32),
        full,
        policy=FULL,
        capacity=length,
    )
    parts = [logits]
    one = jnp.ones((batch,), jnp.int32)
    for index in range(prefix, length):
        step = jnp.asarray(tokens[:, index : index + 1])
        logits, cache = extend(model, cache, step, one)
        parts.append(logits)
    return np.stack([np.asarray(part) for part in parts], axis=1)


def test_logits_of_every_position_equal_pytorch(recorded):
    model, arrays = recorded
    mask = causal(model, arrays["tokens"].shape[1])
    logits = np.stack([dense_logits(model, row, mask) for row in arrays["tokens"]])
    assert np.abs(logits - arrays["full"]).max() <= TOLERANCE


def test_prefill_and_cached_decode_equal_pytorch(recorded):
    model, arrays = recorded
    prefix = make_fixtures.PREFIX
    logits = cached_logits(model, arrays["tokens"], prefix)
    assert np.abs(logits - arrays["cached"][:, prefix - 1 :]).max() <= TOLERANCE


def test_ragged_prefill_equals_pytorch(recorded):
    model, arrays = recorded
    tokens = arrays["tokens"]
    lengths = np.array([tokens.shape[1], tokens.shape[1] - 13], np.int32)
    logits, _ = prefill(
        model,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        jnp.asarray(lengths),
        policy=FULL,
        capacity=tokens.shape[1],
    )
    expected = arrays["full"][np.arange(len(lengths)), lengths - 1]
    assert np.abs(np.asarray(logits) - expected).max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_of_a_config_mean_the_same_model(name):
    _, _, metadata = open_fixture(name)
    original = ModelConfig.from_hf(json.loads(metadata["config"]))
    assert ModelConfig.from_hf(json.loads(metadata["saved"])) == original
    assert ModelConfig.from_hf(original.to_hf()) == original


@pytest.mark.parametrize("name", NAMES)
def test_fixtures_are_small(name):
    path = make_fixtures.FIXTURES / f"{name}.safetensors"
    assert path.stat().st_size < make_fixtures.LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_live_pytorch_agrees(name, tmp_path):
    pytest.importorskip("torch")
    peer, tokens = make_fixtures.make_model(name), make_fixtures.make_tokens(name)
    peer.save_pretrained(tmp_path)
    full, cached = (value.numpy() for value in make_fixtures.run(peer, tokens))
    tokens = tokens.numpy().astype(np.int32)
    model = load(tmp_path, dtype=jnp.float32).model
    mask = causal(model, tokens.shape[1])
    logits = np.stack([dense_logits(model, row, mask) for row in tokens])
    assert np.abs(logits - full).max() <= TOLERANCE
    prefix = make_fixtures.PREFIX
    stepped = cached_logits(model, tokens, prefix)
    assert np.abs(stepped - cached[:, prefix - 1 :]).max() <= TOLERANCE
