"""The retention loss against its definition, and gates that do nothing change nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.learned import modules
from tests import tiny
from tests.train.tiny_run import Batches
from train.objectives import token_losses
from train.passes import plain_pass
from train.retention import (
    RetentionConfig,
    RetentionRecipe,
    capacity_loss,
    decayed_pass,
    sampled_positions,
)


@pytest.fixture(scope="module")
def model():
    return tiny.model(num_layers=2)


@pytest.fixture(scope="module")
def batch():
    return {name: jnp.asarray(array[:2]) for name, array in next(Batches()).items()}


def open_gates(recipe, model):
    gates = recipe.init(model, jax.random.key(0))
    return {**gates, "b3": jnp.full_like(gates["b3"], 1e9)}


def layered(recipe, gates, model):
    from kvjax.learned.retention import per_layer

    return per_layer(recipe.config.gates, gates, model.config.num_layers)


def test_open_gates_leave_the_model_as_it_is(model, batch):
    recipe = RetentionRecipe(RetentionConfig(width=8, memory=4), 32)
    gates = layered(recipe, open_gates(recipe, model), model)
    at = sampled_positions(jax.random.key(0), batch["segments"], 0)
    decayed, held = decayed_pass(model, gates, batch, at)
    seen = batch["segments"] >= 0
    np.testing.assert_allclose(
        np.asarray(decayed)[seen], np.asarray(plain_pass(model, batch))[seen], atol=1e-5
    )
    # Every entry of the document is alive: position + 1 of them.
    expected = np.where(seen, np.asarray(batch["positions"]) + 1, 0)
    np.testing.assert_allclose(held[0, :, 0], expected, rtol=1e-5)


def test_packed_documents_do_not_see_each_other(model, batch):
    alone = {name: array[:, 20:29] for name, array in batch.items()}
    together = np.asarray(plain_pass(model, batch))[:, 20:29]
    np.testing.assert_allclose(together, plain_pass(model, alone), rtol=1e-4, atol=1e-5)


def test_the_plain_pass_is_the_models_own(model, batch):
    tokens = np.asarray(batch["tokens"])[:, :20]
    logits, _ = kvjax.prefill(model, tokens, policy="full")
    x = plain_pass(model, {name: array[:, :20] for name, array in batch.items()})
    np.testing.assert_allclose(model.logits(x[:, -1]), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [5, 32, 64])
def test_token_losses_are_the_sums_over_labelled_positions(model, batch, block):
    rng = np.random.default_rng(0)
    shape = (2, 32, model.config.hidden_size)
    student, teacher = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    found = token_losses(model, student, teacher, batch["tokens"], batch["labels"], block)
    p = np.asarray(jax.nn.log_softmax(model.logits(student)), np.float64)
    q = np.asarray(jax.nn.log_softmax(model.logits(teacher)), np.float64)
    tokens, labels = np.asarray(batch["tokens"]), np.asarray(batch["labels"])
    cross, apart = 0.0, 0.0
    for b, t in zip(*np.nonzero(labels), strict=True):
        cross -= p[b, t, tokens[b, t + 1]]
        apart += float((np.exp(q[b, t]) * (q[b, t] - p[b, t])).sum())
    np.testing.assert_allclose(found.cross_entropy, cross, rtol=1e-4)
    np.testing.assert_allclose(found.divergence, apart, rtol=1e-4)
    assert float(found.count) == labels.sum()


@pytest.mark.parametrize("capacity", ["global", "local"])
def test_capacity_is_the_ratio_over_the_memory(capacity):
    rng = np.random.default_rng(2)
    held = rng.uniform(0, 30, (3, 2, 4, 5)).astype(np.float32)  # [L, B, K, P]
    age = rng.integers(0, 40, (2, 5)).astype(np.int32)
    present = rng.random((2, 5)) < 0.8
    memory, terms = 6, []
    for b, p in zip(*np.nonzero(present), strict=True):
        if capacity == "global":
            over = held[:, b, :, p].sum() - memory * 12
            terms.append(max(0.0, over / max((age[b, p] - memory) * 12, 1)))
        else:
            over = np.maximum(0.0, (held[:, b, :, p] - memory) / max(age[b, p] - memory, 1))
            terms += over.ravel().tolist()
    positive = [term for term in terms if term > 0]
    found = capacity_loss(
        jnp.asarray(held), jnp.asarray(age), jnp.asarray(present), memory, capacity
    )
    np.testing.assert_allclose(found, np.mean(positive), rtol=1e-5)


def test_capacity_starts_near_one_and_ends_at_zero():
    age = jnp.arange(64, dtype=jnp.int32)[None]
    present = jnp.ones((1, 64), bool)
    full = jnp.broadcast_to((age + 1).astype(jnp.float32)[None, :, None], (2, 1, 3, 64))
    for kind in ("global", "local"):
        assert capacity_loss(full, age, present, 8, kind) == pytest.approx(1.0, abs=0.2)
        assert capacity_loss(jnp.minimum(full, 8.0), age, present, 8, kind) == 0.0


def test_the_name_says_whose_entries_the_capacity_counts():
    assert RetentionConfig().shared_by == "global"
    assert RetentionConfig(name="retention-local").shared_by == "local"
    assert RetentionConfig(name="retention-local", capacity="global").shared_by == "global"


def test_a_capacity_of_all_entries_is_refused():
    with pytest.raises(ValueError, match=r"module.memory=32: rows have 32 tokens.*integers < 32"):
        RetentionRecipe(RetentionConfig(memory=32), 32)


def test_sampled_positions_are_different_places():
    segments = jnp.zeros((3, 50), jnp.int32)
    at = np.asarray(sampled_positions(jax.random.key(1), segments, 20))
    assert all(len(set(row)) == 20 for row in at.tolist()) and at.min() >= 0 and at.max() < 50
    assert np.array_equal(sampled_positions(jax.random.key(1), segments, 0)[0], np.arange(50))


@pytest.mark.parametrize("change", [{"kl": False}, {"ce": False}, {"capacity_weight": 0.0}])
def test_terms_can_be_left_out(model, batch, change):
    recipe = RetentionRecipe(RetentionConfig(width=8, memory=4, bias=2.0, **change), 32)
    params = recipe.init(model, jax.random.key(0))
    loss, parts = recipe.loss(params, model, batch, jax.random.key(1))
    terms = [parts[name] for name in ("kl", "ce") if change.get(name, True)]
    weight = change.get("capacity_weight", 1.0)
    assert loss == pytest.approx(float(sum(terms) / len(terms) + weight * parts["capacity"]))


def test_every_gate_gets_a_gradient(model, batch):
    recipe = RetentionRecipe(RetentionConfig(width=8, memory=4, bias=2.0), 32)
    params = recipe.init(model, jax.random.key(0))
    gradients = jax.grad(lambda p: recipe.loss(p, model, batch, jax.random.key(1))[0])(params)
    assert set(gradients) == set(params)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all() and float(jnp.abs(gradient).max()) > 0, name


def test_an_exported_module_is_a_policy_of_its_backbone_only(model, tmp_path):
    recipe = RetentionRecipe(RetentionConfig(width=8, memory=4, name="retention-local"), 32)
    params = recipe.init(model, jax.random.key(0))
    recipe.export(params, model, tmp_path, {"model": "tiny", "steps": 3})
    card = modules.read_card(tmp_path)
    assert card.training["steps"] == 3 and len(card.fingerprints) == 3
    policy, gates = kvjax.load_policy(tmp_path, model)
    assert policy.name == "retention-local" and gates["w3"].shape[0] == 2
    prompt = tiny.tokens(rows=1)
    _, cache = kvjax.prefill(model, prompt, policy=policy, budget=9, params=gates)
    assert int(cache.lengths.max()) >= 9
    other = kvjax.Decoder.random(model.config, jax.random.key(99))
    with pytest.raises(ValueError, match="was trained for tiny"):
        kvjax.load_policy(tmp_path, other)
    half = kvjax.Decoder(
        model.config, {n: a.astype("bfloat16") for n, a in model.parameters.items()}
    )
    kvjax.load_policy(tmp_path, half)  # the same weights, rounded
    with pytest.raises(FileNotFoundError, match="holds no trained module"):
        kvjax.load_policy(tmp_path / "nowhere", model)


@pytest.mark.parametrize(
    ("options", "arrays", "message"),
    [
        ({"width": 8, "depth": 2}, {}, "options .*'depth': 2.* of its card: .*'depth'"),
        ({"width": 0}, {}, "width=0: allowed are integers"),
        ({}, {"b3": None}, "without 'b3': needed are"),
        ({}, {"b4": jnp.zeros(3)}, "with 'b4': needed are"),
        ({}, {"w3": jnp.zeros((2, 8, 2))}, r"'w3' is float32 of shape \(2, 8, 2\): needed is"),
        ({}, {"b3": jnp.zeros(2, jnp.int32)}, "'b3' is int32 of shape"),
    ],
)
def test_a_damaged_module_is_refused_in_one_line(model, tmp_path, options, arrays, message):
    recipe = RetentionRecipe(RetentionConfig(width=8, memory=4), 32)
    params = recipe.init(model, jax.random.key(0))
    recipe.export(params, model, tmp_path, {"model": "tiny"})
    card = modules.read_card(tmp_path)
    changed = {name: a for name, a in (params | arrays).items() if a is not None}
    modules.save_module(
        tmp_path, changed, dataclasses.replace(card, options=dict(card.options) | options)
    )
    with pytest.raises(ValueError, match=message) as caught:
        kvjax.policy_params(model, kvjax.policy("retention-global", path=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_training_goes_on_from_an_exported_module(model, tmp_path):
    first = RetentionRecipe(RetentionConfig(width=8, memory=4), 32)
    params = first.init(model, jax.random.key(0))
    first.export(params, model, tmp_path, {"model": "tiny"})
    config = RetentionConfig(width=8, memory=4, name="retention-local", start=str(tmp_path))
    found = jax.jit(lambda key: RetentionRecipe(config, 32).init(model, key))(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, found, params)
    second = RetentionRecipe(config, 32)
    second.export(found, model, tmp_path / "second", {"model": "tiny", "steps": 2})
    assert modules.read_card(tmp_path / "second").training["before"] == {"model": "tiny"}
    other = RetentionRecipe(dataclasses.replace(config, width=4), 32)
    with pytest.raises(ValueError, match=r"holds retention .*'width': 8"):
        other.init(model, jax.random.key(0))
    deeper = tiny.model(num_layers=3)
    with pytest.raises(ValueError, match="of another backbone"):
        RetentionRecipe(config, 32).init(deeper, jax.random.key(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "retention"}, "module.name='retention'"),
        ({"memory": 0}, "module.memory=0"),
        ({"capacity_weight": -1.0}, "module.capacity_weight=-1.0: allowed: numbers >= 0"),
        ({"capacity_weight": float("nan")}, "module.capacity_weight=nan"),
        ({"bias": float("inf")}, "module.bias=inf"),
        ({"kl": False, "ce": False}, "both false"),
        ({"gate": "rg", "tie_heads": True}, "tie_heads"),
        ({"width": 0}, "width=0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RetentionConfig(**options)
