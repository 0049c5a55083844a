"""The indexer's loss against its definition, and what comes of training it."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kernels_pallas.attention import NO_WINDOW
from kvjax.learned import modules
from tests import tiny
from tests.train import tiny_run
from tests.train.tiny_run import Batches
from train.indexer import (
    IndexerRecipe,
    IndexerTraining,
    behind_a_cut,
    compare,
    student_importance,
    teacher_importance,
)
from train.loop import train
from train.metrics import METRICS_FILE, read_lines
from train.passes import Layer, frozen_pass, plain_pass

CHOICES = [
    ("logprob", "max"),
    ("logprob", "mean"),
    ("logit", "max"),
    ("logit", "mean"),
    ("logit", "concat"),
]


@pytest.fixture(scope="module")
def model():
    return tiny.model(num_layers=2)


@pytest.fixture(scope="module")
def batch():
    return {name: jnp.asarray(array[:2]) for name, array in next(Batches()).items()}


@pytest.fixture(scope="module")
def layers(model, batch):
    """What every layer computed, stacked, and the last residual stream."""
    return frozen_pass(model, batch, lambda layer, own: layer)


def layer_of(layers, index):
    return jax.tree.map(lambda array: array[index], layers)


def test_the_frozen_pass_is_the_plain_one(model, batch, layers):
    seen = np.asarray(batch["segments"]) >= 0
    wanted = np.asarray(plain_pass(model, batch))
    np.testing.assert_allclose(np.asarray(layers[0])[seen], wanted[seen], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(layers[1].window, [NO_WINDOW] * 2)


def pairs(segments, near):
    """(row, query, key) of every pair that counts."""
    for b, s in np.ndindex(segments.shape):
        for t in range(s - near + 1):
            if segments[b, s] == segments[b, t] >= 0:
                yield b, s, t


@pytest.mark.parametrize(("teacher", "head_reduce"), CHOICES)
@pytest.mark.parametrize("near", [0, 3])
def test_the_teacher_is_the_pooled_logit_of_the_frozen_model(
    batch, layers, teacher, head_reduce, near
):
    config = IndexerTraining(teacher=teacher, head_reduce=head_reduce, near=near)
    layer, segments = layer_of(layers[1], 1), np.asarray(batch["segments"])
    queries, keys = (np.asarray(a, np.float64) for a in (layer.new.queries, layer.new.keys))
    logits = np.einsum("bhsd,bhtd->bhst", queries, np.repeat(keys, 2, axis=1))
    wanted = np.full(segments.shape, -np.inf)
    everything = set(pairs(segments, 0))
    for b, s, t in pairs(segments, near):
        if head_reduce == "concat":
            score = logits[b, :, s, t].sum() / np.sqrt(4 * 8)
        else:
            heads = logits[b, :, s, t] / np.sqrt(8)
            if teacher == "logprob":
                seen = [j for j in range(s + 1) if (b, s, j) in everything]
                heads = heads - np.log(np.exp(logits[b, :, s][:, seen] / np.sqrt(8)).sum(axis=1))
            score = heads.max() if head_reduce == "max" else heads.mean()
        wanted[b, t] = max(wanted[b, t], score)
    found = teacher_importance(config, layer, batch["segments"])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_with_foresight_later_queries_teach_what_earlier_ones_have_to_tell(model, batch, layers):
    config = IndexerTraining(near=2, sinks=1, foresee=True, size=8, heads=2)
    behind = np.asarray(behind_a_cut(config, batch, jax.random.key(3)))
    segments, places = np.asarray(batch["segments"]), np.asarray(batch["positions"])
    for row, document, length in [(0, 0, 20), (0, 1, 9), (1, 0, 20), (1, 1, 9)]:
        cut = np.flatnonzero(behind[row] & (segments[row] == document))
        assert 0.4 * length <= places[row, cut[0]] <= 0.9 * length + 1
        np.testing.assert_array_equal(np.diff(cut), 1)  # from the cut to the document's end
        assert places[row, cut[-1]] == length - 1
    later, earlier = np.where(behind, segments, -1), np.where(behind, -1, segments)
    layer = layer_of(layers[1], 1)
    queries, keys = (np.asarray(a, np.float64) for a in (layer.new.queries, layer.new.keys))
    logits = np.einsum("bhsd,bhtd->bhst", queries, np.repeat(keys, 2, axis=1)) / np.sqrt(8)
    wanted = np.full(segments.shape, -np.inf)
    for b, s, t in pairs(segments, 2):
        if behind[b, s]:
            score = (logits[b, :, s, t] - np.asarray(layer.lse)[b, :, s]).max()
            wanted[b, t] = max(wanted[b, t], score)
    teacher = teacher_importance(config, layer, batch["segments"], jnp.asarray(later))
    np.testing.assert_allclose(teacher, wanted, rtol=1e-4, atol=1e-4)

    recipe = IndexerRecipe(config, 32)
    indexer = recipe.init(model, jax.random.key(0))
    own = {name: array[1] for name, array in indexer.items()}
    student = np.asarray(
        student_importance(config, own, layer, batch["segments"], jnp.asarray(earlier))
    )
    # Other tokens behind the cut do not change what those before it say.
    changed = {**batch, "tokens": jnp.where(behind, (batch["tokens"] + 1) % 97, batch["tokens"])}
    _, others = frozen_pass(model, changed, lambda layer, own: layer)
    again = student_importance(
        config, own, layer_of(others, 1), batch["segments"], jnp.asarray(earlier)
    )
    before = earlier >= 0
    np.testing.assert_allclose(np.asarray(again)[before], student[before], rtol=1e-4, atol=1e-5)
    loss, told = recipe.loss(indexer, model, batch, jax.random.key(3))
    assert loss > 0 and 0 <= told["overlap"] <= 1
    gradients = jax.grad(lambda p: recipe.loss(p, model, batch, jax.random.key(3))[0])(indexer)
    assert all(np.isfinite(g).all() and np.asarray(g).any() for g in gradients.values())


def random_pools(seed=0):
    rng = np.random.default_rng(seed)
    segments = np.array([[0] * 9 + [1] * 5 + [2] * 2 + [-1] * 4, [0] * 20])
    counted = (segments >= 0) & (rng.random(segments.shape) < 0.8)
    counted[0, 14:16] = False  # a document of which nothing counts is no document
    pools = [np.where(counted, rng.normal(size=(2, 20)) * 2, -np.inf) for _ in range(2)]
    return segments, counted, pools


def test_documents_are_distributions_of_their_counted_keys():
    segments, counted, (teacher, student) = random_pools()
    divergence, overlap, documents = [], [], 0
    for b, document in ((0, 0), (0, 1), (1, 0)):
        mine = counted[b] & (segments[b] == document)
        p, q = (np.exp(z[b, mine]) / np.exp(z[b, mine]).sum() for z in (teacher, student))
        divergence.append((p * np.log(p / q)).sum())
        quarter = -(-mine.sum() // 4)
        best = [set(np.argsort(-z)[:quarter].tolist()) for z in (p, q)]
        overlap.append(len(best[0] & best[1]) / quarter)
        documents += 1
    found = compare(
        *(jnp.asarray(a, jnp.float32) for a in (teacher, student)),
        *map(jnp.asarray, (segments.astype(np.int32), counted)),
    )
    np.testing.assert_allclose(found, (sum(divergence), sum(overlap), documents), rtol=1e-5)


def test_what_is_left_out_changes_nothing_and_gets_no_gradient():
    segments, counted, (teacher, student) = random_pools(1)

    def divergence(student, teacher):
        return compare(
            teacher, student, jnp.asarray(segments.astype(np.int32)), jnp.asarray(counted)
        )[0]

    def filled(pool, value):
        return jnp.asarray(np.where(counted, pool, value), jnp.float32)

    results = [
        jax.value_and_grad(divergence)(filled(student, value), filled(teacher, value))
        for value in (-np.inf, 7.0)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
    gradient = np.asarray(results[0][1])
    assert np.isfinite(gradient).all() and not gradient[~counted].any()
    assert np.abs(gradient[counted]).min() > 0


def test_a_student_that_equals_its_teacher_has_no_loss():
    segments, counted, (teacher, _) = random_pools(2)
    teacher = jnp.asarray(teacher, jnp.float32)
    divergence, overlap, documents = compare(
        teacher, teacher + 3.0, jnp.asarray(segments.astype(np.int32)), jnp.asarray(counted)
    )
    assert abs(float(divergence)) < 1e-5 and overlap == documents == 3


def test_an_indexer_with_the_models_own_queries_and_keys_has_almost_no_loss(batch):
    """In a layer whose keys and queries need no rotation and have no norm of their own."""
    heads, size, width = 2, 4, 8
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(2, 32, width))
    u, k = rng.normal(size=(2, width, heads * size)), rng.normal(size=(width, size))

    def normal(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True))

    queries = normal((hidden @ u[0]).reshape(2, 32, heads, size)).transpose(0, 2, 1, 3)
    keys = np.broadcast_to(normal(hidden @ k)[:, None], (2, 1, 32, size))
    gates = hidden @ rng.normal(size=(width, heads))

    @dataclasses.dataclass
    class New:
        hidden: jax.Array
        queries_pre_rope: jax.Array
        queries: jax.Array
        keys: jax.Array

    def array(x):
        return jnp.asarray(x, jnp.float32)

    wg = np.linalg.lstsq(hidden.reshape(-1, width), gates.reshape(-1, heads), rcond=None)[0]
    weighted = queries * gates.transpose(0, 2, 1)[..., None]  # a teacher of summed, gated heads
    layer = Layer(
        New(array(hidden), array(queries), array(weighted), array(keys)),
        jnp.zeros((2, heads, 32, size), jnp.float32),
        jnp.zeros((2, heads, 32), jnp.float32),
        jnp.int32(NO_WINDOW),
    )
    config = IndexerTraining(
        teacher="logit", head_reduce="concat", activation="identity", heads=heads, size=size
    )
    indexer = {
        "wq": array(np.eye(heads * size)),
        "wk": array(k),
        "wg": array(wg),
        "q_norm": jnp.ones(size, jnp.float32),
        "k_norm": jnp.ones(size, jnp.float32),
    }
    segments = batch["segments"]
    teacher = teacher_importance(config, layer, segments)
    student = student_importance(config, indexer, layer, segments)
    np.testing.assert_allclose(student, teacher, rtol=1e-4, atol=1e-4)
    divergence, overlap, documents = compare(teacher, student, segments, teacher > -jnp.inf)
    assert float(divergence) < 1e-5 and overlap == documents == 4


def test_sinks_padding_and_unseen_keys_are_left_out(model, batch):
    """Only documents of more than sinks + near tokens have anything to learn from."""
    recipe = IndexerRecipe(IndexerTraining(near=3, sinks=4), 32)
    params = recipe.init(model, jax.random.key(0))
    short = {
        **batch,
        "segments": jnp.where(jnp.arange(32)[None] < 7, batch["segments"], -1),
    }
    loss, parts = recipe.loss(params, model, short, jax.random.key(1))
    assert loss == parts["overlap"] == 0.0
    longer = {**short, "segments": jnp.where(jnp.arange(32)[None] < 9, batch["segments"], -1)}
    loss, parts = recipe.loss(params, model, longer, jax.random.key(1))
    assert loss > 0 and 0 <= parts["overlap"] <= 1


def test_sliding_window_layers_have_nothing_to_learn(batch):
    model = tiny.model()  # its second layer slides
    recipe = IndexerRecipe(IndexerTraining(near=1), 32)
    params = recipe.init(model, jax.random.key(0))
    gradients = jax.grad(lambda p: recipe.loss(p, model, batch, jax.random.key(1))[0])(params)
    for gradient in gradients.values():
        assert not np.asarray(gradient[1]).any() and np.asarray(gradient[0]).any()


@pytest.mark.parametrize(("teacher", "head_reduce"), CHOICES)
def test_every_parameter_gets_a_gradient(model, batch, teacher, head_reduce):
    config = IndexerTraining(near=2, teacher=teacher, head_reduce=head_reduce)
    recipe = IndexerRecipe(config, 32)
    params = recipe.init(model, jax.random.key(0))
    gradients = jax.grad(lambda p: recipe.loss(p, model, batch, jax.random.key(1))[0])(params)
    assert set(gradients) == set(params) == set(recipe.axes(params))
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all() and float(jnp.abs(gradient).max()) > 0, name


def settings(output, **changes):
    return tiny_run.config(
        str(output),
        **{
            "module": {"kind": "indexer", "near": 2, "size": 8, "heads": 2},
            "optimizer": {"learning_rate": 0.02, "warmup": 0, "schedule": "constant"},
            **changes,
        },
    )


def test_the_loss_falls_and_the_export_is_a_policy(model, tmp_path):
    config = settings(tmp_path / "run", steps=30)
    recipe = IndexerRecipe(config.module, config.length)

    class Same(Batches):
        def __next__(self):
            self.made = 0
            return super().__next__()

    state = train(config, recipe, model, Same(), lambda line: None)
    lines = read_lines(tmp_path / "run" / METRICS_FILE)
    assert lines[-1]["kl"] < 0.7 * lines[0]["kl"]
    assert lines[-1]["overlap"] > lines[0]["overlap"]
    recipe.export(state.params, model, tmp_path / "export", {"model": "tiny", "steps": 30})
    written = modules.read_card(tmp_path / "export")
    assert (written.kind, written.module) == ("indexer", "indexmem-no-memory")
    assert json.loads(json.dumps(written.options))["near"] == 2
    policy, params = kvjax.load_policy(tmp_path / "export", model)
    assert policy.scorer.near == 2
    _, cache = kvjax.prefill(model, tiny.tokens(rows=1), policy=policy, budget=9, params=params)
    assert (np.asarray(cache.lengths) == 9).all()
    other = kvjax.Decoder.random(model.config, jax.random.key(99))
    with pytest.raises(ValueError, match="was trained for tiny"):
        kvjax.load_policy(tmp_path / "export", other)


def test_memory_of_a_step_is_linear_in_length(model):
    """Far from one array of all pairs per head."""
    recipe = IndexerRecipe(IndexerTraining(), 2048)
    params = recipe.init(model, jax.random.key(0))

    def bytes_at(length):
        batch = {
            name: jax.ShapeDtypeStruct((1, length), jnp.int32)
            for name in ("tokens", "segments", "positions")
        }
        step = jax.jit(jax.grad(lambda p, b: recipe.loss(p, model, b, jax.random.key(0))[0]))
        return step.lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    short, long = bytes_at(1024), bytes_at(2048)
    assert long < 2.2 * short
    assert long < 2048 * 2048 * 4 * 4 / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"near": -1}, "near=-1"),
        ({"sinks": -1}, "module.sinks=-1"),
        ({"head_reduce": "concat"}, "allowed with 'logit'"),
        ({"head_reduce": "sum"}, "sum"),
        ({"teacher": "softmax"}, "softmax"),
        ({"name": "indexmem"}, "indexmem"),
        ({"heads": 0}, "heads=0"),
        ({"first_cut": 0.0}, "module.first_cut=0.0"),
        ({"first_cut": 0.9, "last_cut": 0.5}, "module.last_cut=0.5"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(Exception, match=message):
        IndexerTraining(**options)
