"""The eraser's loss against whole forward passes, and what comes of training it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.learned.eraser import PROJECTIONS
from tests import tiny
from tests.train import tiny_run
from tests.train.data.tokens import StableTokenizer
from train import data
from train.config import from_mapping
from train.data.config import ErasedConfig
from train.data.erasing import REPLY, SPAN
from train.documents import one_document
from train.eraser import EraserRecipe, EraserTraining
from train.loop import train
from train.metrics import METRICS_FILE, read_lines
from train.passes import plain_pass
from train.recipes import recipe_of

LENGTH = 384
SOURCE = ErasedConfig(
    erase=("neighbour", "chain"), lengths=(170, 200), span_tokens=(20, 30), haystacks=("sentences",)
)


@pytest.fixture(scope="module")
def model():
    return tiny.model(num_layers=2)


class Batches:
    """The same batch again and again, its tokens within the tiny vocabulary."""

    def __init__(self, rows=2):
        batches = data.build(
            (SOURCE,), StableTokenizer(), length=LENGTH, batch=rows, seed=0, prefetch=0
        )
        self.batch, self.rows = dict(next(batches)), batches.rows
        self.batch["tokens"] = self.batch["tokens"] % 97
        batches.close()

    def __next__(self):
        return self.batch

    def get_state(self):
        return {}

    def set_state(self, state):
        pass


@pytest.fixture(scope="module")
def batch():
    return {name: jnp.asarray(array) for name, array in Batches().batch.items()}


def recipe(**options):
    return EraserRecipe(EraserTraining(rank=4, **options), LENGTH, 32)


def log_probabilities(model, tokens):
    """log p at every place of one text, by a pass over all of it."""
    row = jnp.asarray(tokens, jnp.int32)[None]
    places = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    x = plain_pass(model, {"tokens": row, "segments": jnp.zeros_like(row), "positions": places})
    return np.asarray(jax.nn.log_softmax(model.logits(x[0]), axis=-1), np.float64)


def test_before_training_the_loss_compares_the_text_with_and_without_the_span(model, batch):
    own, key = recipe(ce=0.5, kl=2.0), jax.random.key(1)
    loss, told = own.loss(own.init(model, jax.random.key(0)), model, batch, key)
    rows, lengths = one_document(batch, key)
    ce, kl = [], []
    for row, length in enumerate(np.asarray(lengths)):
        tokens, parts, labels = (
            np.asarray(rows[name][row, :length]) for name in ("tokens", "parts", "labels")
        )
        clean = parts != SPAN
        with_span, without = (log_probabilities(model, t) for t in (tokens, tokens[clean]))
        asked = np.flatnonzero(labels)
        assert (parts[asked] == REPLY).all() and asked.size
        p = with_span[asked]
        q = without[np.flatnonzero(labels[clean])]
        ce += (-p[np.arange(asked.size), tokens[asked + 1]]).tolist()
        kl += (np.exp(q) * (q - p)).sum(axis=1).tolist()
    np.testing.assert_allclose(told["ce"], np.mean(ce), rtol=1e-4)
    np.testing.assert_allclose(told["kl"], np.mean(kl), rtol=1e-3)
    np.testing.assert_allclose(loss, 0.5 * np.mean(ce) + 2.0 * np.mean(kl), rtol=1e-3)


def test_gradients_reach_what_the_steering_states_depend_on(model, batch):
    own = recipe()
    params = own.init(model, jax.random.key(0))
    gradients = jax.grad(lambda p: own.loss(p, model, batch, jax.random.key(1))[0])(params)
    assert set(gradients) == set(params) == set(own.axes(params))
    for name in PROJECTIONS:
        first, last = np.asarray(gradients[f"{name}.b"])
        assert first.any()
        assert last.any() == (name in ("k_proj", "v_proj"))  # nothing reads the last layer's rest
        assert not np.asarray(gradients[f"{name}.a"]).any()  # B is 0


def test_gradients_equal_finite_differences_of_the_loss(model, batch):
    """Parts of attention are merged by their log-sum-exp: its gradient is in every step."""
    own = recipe(ce=1.0)
    names = own.init(model, jax.random.key(0))
    keys = dict(zip(names, jax.random.split(jax.random.key(3), 2 * len(names)), strict=False))
    params = {n: 0.1 * jax.random.normal(keys[n], a.shape) for n, a in names.items()}
    towards = {
        n: jax.random.normal(jax.random.fold_in(keys[n], 1), a.shape) for n, a in names.items()
    }
    loss = jax.jit(lambda p: own.loss(p, model, batch, jax.random.key(1))[0])
    gradients = jax.jit(jax.grad(loss))(params)
    found = sum(float(jnp.vdot(gradients[n], towards[n])) for n in names)

    def moved(step):
        return float(loss({n: params[n] + step * towards[n] for n in names}))

    step = 5e-4
    wanted = (8 * (moved(step) - moved(-step)) - (moved(2 * step) - moved(-2 * step))) / (12 * step)
    np.testing.assert_allclose(found, wanted, rtol=2e-2)


def settings(output, **changes):
    return tiny_run.config(
        str(output),
        **{
            "module": {"kind": "eraser", "rank": 4},
            "data": [{"erase": ["neighbour"], "lengths": 190, "span_tokens": 30}],
            "length": LENGTH,
            "batch": 2,
            "optimizer": {"learning_rate": 0.02, "warmup": 0, "schedule": "constant"},
            **changes,
        },
    )


def test_the_loss_falls_and_the_export_is_an_eraser(model, tmp_path):
    config = settings(tmp_path / "run", steps=20)
    own = recipe_of(config)
    assert own.extent.span == 64  # the bucket of 30
    with jax.numpy_dtype_promotion("standard"):
        state = train(config, own, model, Batches(), lambda line: None)
    lines = read_lines(tmp_path / "run" / METRICS_FILE)
    assert lines[-1]["kl"] < 0.9 * lines[0]["kl"]
    own.export(state.params, model, tmp_path / "export", {"model": "tiny", "steps": 20})
    eraser = kvjax.load_eraser(model, tmp_path / "export")
    assert eraser.config == own.config.eraser
    jax.tree.map(np.testing.assert_array_equal, eraser.arrays, dict(state.params))
    going_on = recipe(start=str(tmp_path / "export")).init(model, jax.random.key(5))
    jax.tree.map(np.testing.assert_array_equal, going_on, eraser.arrays)
    other = EraserRecipe(EraserTraining(rank=2, start=str(tmp_path / "export")), LENGTH, 32)
    with pytest.raises(ValueError, match=r"module.start=.*'rank': 4.*allowed is eraser of this"):
        other.init(model, jax.random.key(0))
    louder = EraserRecipe(
        dataclasses.replace(own.config, alpha=9.0, start=str(tmp_path / "export")), LENGTH, 32
    )
    with pytest.raises(ValueError, match=r"'alpha': 9"):
        louder.init(model, jax.random.key(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "retention-global"}, "module.name='retention-global': allowed: kveraser"),
        ({"ce": -1.0}, "module.ce=-1.0"),
        ({"ce": 0.0, "kl": 0.0}, "one has to count"),
        ({"reply": 0}, "module.reply=0"),
        ({"rank": 0}, "rank=0"),
        ({"stored": "int8"}, "module.stored='int8': allowed: float32, float16"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EraserTraining(**options)


def test_sources_fit_the_module():
    common = {"model": "tiny", "length": 64, "steps": 1}
    erase = {"erase": ["chain"], "lengths": 40}
    with pytest.raises(ValueError, match=r"data\[0\]: module kind 'eraser' reads sources with"):
        from_mapping({**common, "module": {"kind": "eraser"}, "data": [{"text": "a.txt"}]})
    with pytest.raises(ValueError, match=r"data\[0\]: module kind 'indexer' reads sources without"):
        from_mapping({**common, "module": {"kind": "indexer"}, "data": [erase]})
