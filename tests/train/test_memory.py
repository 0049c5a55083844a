"""The memory's loss against its definition, token by token, and what comes of training it."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.learned import modules
from kvjax.policies.rope import rotate
from tests import tiny
from tests.learned import memory_by_hand as by_hand
from tests.train import tiny_run
from tests.train.tiny_run import Batches
from train.documents import one_document
from train.indexer import IndexerRecipe, IndexerTraining
from train.indexmem import IndexMemRecipe, IndexMemTraining
from train.loop import train
from train.memory import MemoryRecipe, MemoryTraining, kept_entries
from train.metrics import METRICS_FILE, read_lines
from train.passes import frozen_pass
from train.report import page

SMALL = {"features": 6, "near": 2, "size": 8, "heads": 2}


@pytest.fixture(scope="module")
def model():
    return tiny.model(num_layers=2)


@pytest.fixture(scope="module")
def batch():
    return {name: jnp.asarray(array[:3]) for name, array in next(Batches()).items()}


def random_memory(recipe, model):
    """Params with an open gate, so that everything about a read shows in the loss."""
    params = recipe.init(model, jax.random.key(3))
    return {
        name: array + 0.3 * jax.random.normal(jax.random.key(5), array.shape)
        for name, array in params.items()
    }


def test_one_document_of_every_row_moves_to_the_front(batch):
    seen = set()
    for seed in range(20):
        moved, lengths = one_document(batch, jax.random.key(seed))
        tokens, lengths = np.asarray(moved["tokens"]), np.asarray(lengths)
        for row, (found, length) in enumerate(zip(tokens, lengths, strict=True)):
            start = {20: 0, 9: 20}[int(length)]  # the documents of `tiny_run.Batches`
            wanted = np.asarray(batch["tokens"])[row, start : start + length]
            np.testing.assert_array_equal(found[:length], wanted)
            seen.add(int(length))
    assert seen == {20, 9}


@pytest.mark.parametrize("allocator", ["uniform", "global"])
def test_what_is_kept_is_what_a_prefill_leaves(model, allocator):
    policy = tiny.policy("snapkv", allocator=allocator)
    tokens = jnp.asarray(tiny.tokens(rows=3, length=32))
    lengths, budget = jnp.asarray([32, 20, 5], jnp.int32), jnp.asarray([9, 4, 2], jnp.int32)
    kept = np.asarray(kept_entries(policy, None, model, tokens, lengths, budget))
    for row in range(3):
        prompt = tokens[row : row + 1, : lengths[row]]
        _, cache = kvjax.prefill(model, prompt, policy=policy, budget=budget[row : row + 1])
        for layer, head in np.ndindex(2, 2):
            positions = np.asarray(cache.positions[layer, 0, head])
            wanted = sorted(positions[positions >= 0].tolist())
            assert np.flatnonzero(kept[layer, row, head]).tolist() == wanted


def loss_by_hand(recipe, params, model, batch, key):
    """Every layer's |o - combined|^2, |o - o_attn|^2 and mean weight, one token at a time."""
    config, memory = recipe.config, recipe.config.memory
    at = jax.random.split(key, 3)
    moved, lengths = one_document(batch, at[0])
    tokens = moved["tokens"]
    rows, width = tokens.shape
    cuts = jax.random.uniform(at[1], (rows,), minval=config.first_cut, maxval=config.last_cut)
    gone = jax.random.uniform(
        at[2], (rows,), minval=config.least_evicted, maxval=config.most_evicted
    )
    cut = np.maximum(1, np.asarray(cuts * lengths.astype(jnp.float32)).astype(int))
    budget = np.maximum(1, np.asarray((1.0 - gone) * cut.astype(np.float32)).astype(int))
    fixed = recipe.fixed(model)
    as_int = (jnp.asarray(array, jnp.int32) for array in (cut, budget))
    kept = np.asarray(kept_entries(recipe.selector, fixed, model, tokens, *as_int))
    there = np.arange(width)[None] < np.asarray(lengths)[:, None]
    place = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    document = {
        "tokens": tokens,
        "segments": jnp.where(there, 0, -1).astype(jnp.int32),
        "positions": place,
    }
    _, layers = frozen_pass(model, document, lambda layer, own: layer)
    heads, kv_heads, dim = 4, 2, 8
    error, lost, weights = np.zeros((3, 2))
    for layer in range(2):
        own = {name: np.asarray(a[layer], np.float64) for name, a in params.items()}
        new = jax.tree.map(lambda a, at=layer: a[at], layers.new)
        spread = jnp.broadcast_to(place[:, None], (rows, kv_heads, width))
        frequencies = jnp.asarray(model.rope_frequencies[0])
        plain = np.asarray(rotate(new.keys, spread, frequencies, inverse=True), np.float64)
        q, k, v, asked = (
            np.asarray(a, np.float64)
            for a in (new.queries, new.keys, new.values, new.queries_pre_rope)
        )
        count = 0
        for b in range(rows):
            evicted = ~kept[layer, b] & (np.arange(width) < cut[b])
            empty = np.zeros((6, kv_heads * dim)), np.zeros(6)
            positions = np.tile(np.arange(width), (kv_heads, 1))
            state = by_hand.write(
                memory, own, empty, plain[b], v[b], positions, evicted, heads, decays=False
            )
            for t in range(cut[b], int(lengths[b])):
                full, part, lse = np.zeros((heads, dim)), np.zeros((heads, dim)), np.zeros(heads)
                for h in range(heads):
                    g = h // 2
                    logits = k[b, g, : t + 1] @ q[b, h, t] / math.sqrt(dim)
                    p = np.exp(logits)
                    full[h] = p @ v[b, g, : t + 1] / p.sum()
                    p = np.where(evicted[g, : t + 1], 0.0, p)
                    part[h], lse[h] = p @ v[b, g, : t + 1] / p.sum(), np.log(p.sum())
                m, mass = by_hand.read(memory, own, state, asked[b, :, t])
                logit = by_hand.gate(own, asked[b, :, t])
                out = by_hand.combine(memory, part, lse, m, mass, logit)
                error[layer] += ((full - out) ** 2).sum()
                lost[layer] += ((full - part) ** 2).sum()
                shift = np.log(mass) - lse if memory.combine == "lse" else 0.0
                weights[layer] += np.mean(1 / (1 + np.exp(-(logit + shift)))) if mass.any() else 0.0
                count += 1
        weights[layer] /= count
    return error, lost, weights


@pytest.mark.parametrize("combine", ["residual", "convex", "lse"])
def test_the_loss_is_its_definition(model, batch, combine):
    recipe = MemoryRecipe(MemoryTraining(features=6, combine=combine), 32)
    params = random_memory(recipe, model)
    key, fixed = jax.random.key(11), recipe.fixed(model)
    loss, told = recipe.loss(params, model, batch, key, fixed)
    error, lost, weights = loss_by_hand(recipe, params, model, batch, key)
    np.testing.assert_allclose(told["gap_closed_by_layer"], 1 - error / lost, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(told["gate_by_layer"], weights, rtol=1e-4)
    np.testing.assert_allclose(loss, np.mean(error / lost), rtol=1e-4)
    np.testing.assert_allclose(told["gap_closed"], 1 - loss, rtol=1e-5)


def test_a_closed_gate_closes_nothing(model, batch):
    recipe = MemoryRecipe(MemoryTraining(features=6), 32)
    params = recipe.init(model, jax.random.key(0))
    params["gate_b2"] = jnp.full_like(params["gate_b2"], -200.0)
    loss, told = recipe.loss(params, model, batch, jax.random.key(1), recipe.fixed(model))
    assert loss == 1.0 and told["gap_closed"] == told["gate"] == 0.0


@pytest.mark.parametrize("phi", ["compact", "dense", "per_head"])
def test_every_parameter_gets_a_gradient(model, batch, phi):
    recipe = MemoryRecipe(MemoryTraining(features=6, phi=phi), 32)
    params = random_memory(recipe, model)
    fixed = recipe.fixed(model)
    gradients = jax.grad(lambda p: recipe.loss(p, model, batch, jax.random.key(1), fixed)[0])(
        params
    )
    assert set(gradients) == set(params) == set(recipe.axes(params))
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all() and float(jnp.abs(gradient).max()) > 0, name


def test_sliding_window_layers_have_nothing_to_learn(batch):
    model = tiny.model()  # its second layer slides
    recipe = MemoryRecipe(MemoryTraining(features=6), 32)
    params = random_memory(recipe, model)
    fixed = recipe.fixed(model)
    loss = lambda p: recipe.loss(p, model, batch, jax.random.key(1), fixed)  # noqa: E731
    gradients, told = jax.grad(loss, has_aux=True)(params)
    assert not np.asarray(gradients["phi"][1]).any() and np.asarray(gradients["phi"][0]).any()
    assert told["gap_closed_by_layer"][1] == told["gate_by_layer"][1] == 0.0


def run(output, module, model, steps=40):
    config = tiny_run.config(
        str(output),
        steps=steps,
        module=module,
        optimizer={"learning_rate": 0.02, "warmup": 0, "schedule": "constant"},
    )
    from train.recipes import recipe_of

    class Same(Batches):
        def __next__(self):
            self.made = 0
            return super().__next__()

    recipe = recipe_of(config)
    state = train(config, recipe, model, Same(), lambda line: None)
    facts = {"model": "tiny", "steps": steps}
    recipe.export(state.params, model, output / "export", facts)
    return state.params, read_lines(output / METRICS_FILE)


def test_the_gap_closes_and_the_export_is_a_policy(model, tmp_path):
    module = {"kind": "memory", "name": "snapkv+memory", "features": 6, "combine": "convex"}
    params, lines = run(tmp_path, module, model)
    first, last = (np.mean([line["gap_closed"] for line in part]) for part in
                   (lines[:5], lines[-5:]))  # fmt: skip
    assert last > first + 0.05
    assert len(lines[-1]["gap_closed_by_layer"]) == 2
    assert "By layer" in page("run", {"kind": "memory", "model": "tiny", "steps": 40, "batch": 8,
                                      "length": 32}, lines)  # fmt: skip
    policy, loaded = kvjax.load_policy(tmp_path / "export", model)
    assert policy.name == "snapkv+memory" and policy.remainder.config.combine == "convex"
    jax.tree.map(np.testing.assert_array_equal, loaded["memory"], params)


def exported_indexer(model, directory):
    """An indexer as the first stage leaves it, for `SMALL`."""
    config = IndexerTraining(near=SMALL["near"], size=SMALL["size"], heads=SMALL["heads"])
    recipe = IndexerRecipe(config, 32)
    params = recipe.init(model, jax.random.key(9))
    recipe.export(params, model, directory, {"model": "tiny"})
    return params


def test_indexmem_goes_on_from_its_indexer_and_exports_both(model, tmp_path):
    before = exported_indexer(model, tmp_path / "first")
    config = IndexMemTraining(**SMALL, start=str(tmp_path / "first"))
    fresh = IndexMemRecipe(config, 32).init(model, jax.random.key(0))
    for name, array in before.items():
        np.testing.assert_array_equal(fresh[f"indexer.{name}"], array)
    module = {"kind": "indexmem", "start": str(tmp_path / "first"), **SMALL}
    params, lines = run(tmp_path / "second", module, model, steps=30)
    assert lines[-1]["kl"] < lines[0]["kl"]
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["kl"] + 1 - lines[-1]["gap_closed"])
    export = tmp_path / "second" / "export"
    assert modules.read_card(export / "scorer").module == "indexmem-no-memory"
    policy, loaded = kvjax.load_policy(export, model)
    assert policy.name == "indexmem" and policy.scorer.near == 2
    for part, name in (("scorer", "indexer."), ("memory", "memory.")):
        for key, array in loaded[part].items():
            np.testing.assert_array_equal(array, params[name + key])
    _, cache = kvjax.prefill(
        model, tiny.tokens(rows=1), policy=policy, budget=9, room=4, params=loaded
    )
    assert (np.asarray(cache.lengths) == 9).all()
    assert np.asarray(cache.policy_state.memory["memory.squares"]).any()


def test_the_choice_of_what_to_evict_has_no_gradient(model, batch):
    """The indexer learns from its own loss alone."""
    together = IndexMemRecipe(IndexMemTraining(**SMALL), 32)
    params = together.init(model, jax.random.key(0))
    key = jax.random.key(1)
    both = jax.grad(lambda p: together.loss(p, model, batch, key)[0])(params)
    own = {n.removeprefix("indexer."): a for n, a in params.items() if n.startswith("indexer.")}
    alone = jax.grad(lambda p: together.indexer.loss(p, model, batch, key)[0])(own)
    for name, gradient in alone.items():
        np.testing.assert_allclose(both[f"indexer.{name}"], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("cls", "options", "message"),  # checked types have an error of their own
    [
        (MemoryTraining, {"name": "snapkv"}, "module.name='snapkv': allowed: retention-global"),
        (MemoryTraining, {"name": "indexmem"}, "module.name='indexmem'"),
        (MemoryTraining, {"least_evicted": 0.9, "most_evicted": 0.5}, "module.least_evicted=0.9"),
        (MemoryTraining, {"last_cut": 1.0}, "module.last_cut=1.0"),
        (MemoryTraining, {"combine": "sum"}, "combine"),
        (IndexMemTraining, {"name": "snapkv+memory"}, "allowed: indexmem"),
        (IndexMemTraining, {"selector_path": "x"}, "module.selector_path='x'"),
        (IndexMemTraining, {"memory_weight": 0.0}, "module.memory_weight=0.0"),
        (IndexMemTraining, {"near": -1}, "near=-1"),
    ],
)
def test_bad_options_are_refused(cls, options, message):
    with pytest.raises(Exception, match=message):
        cls(**options)


def test_a_policy_without_weights_takes_no_path():
    with pytest.raises(ValueError, match="snapkv\\+memory needs no trained module"):
        MemoryTraining(selector_path="somewhere").selector()


def test_another_start_is_refused(model, tmp_path):
    exported_indexer(model, tmp_path)
    config = IndexMemTraining(**{**SMALL, "near": 3}, start=str(tmp_path))
    with pytest.raises(ValueError, match=r"module.start=.*allowed is indexer of this config's"):
        IndexMemRecipe(config, 32).init(model, jax.random.key(0))
    narrow = dataclasses.replace(tiny.CONFIG, hidden_size=24, num_layers=2, windows=())
    other = kvjax.Decoder.random(narrow, jax.random.key(1))
    config = IndexMemTraining(**SMALL, start=str(tmp_path))
    with pytest.raises(ValueError, match="of another backbone"):
        IndexMemRecipe(config, 32).init(other, jax.random.key(0))
