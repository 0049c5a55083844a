"""The eraser's adapters: their size, what they add, how they learn, and their files."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax import decoding
from kvjax.erasing import Extent, apply
from kvjax.erasing.steering import KVEraser
from kvjax.learned import modules
from kvjax.learned.eraser import (
    PROJECTIONS,
    Eraser,
    EraserConfig,
    check_eraser,
    eraser_shapes,
    init_eraser,
    load_eraser,
    parameter_count,
    save_eraser,
)
from tests import tiny
from tests.erasing.setting import eraser
from tests.models.small import CONFIGS, random_model

SIZES = {  # hidden, intermediate, layers, heads, KV heads, head size -> parameters at rank 16
    "Qwen3-8B": ((4096, 12288, 36, 32, 8, 128), 43_646_976),
    "SmolLM2-135M": ((576, 1536, 30, 9, 3, 64), 4_884_480),
    "Llama-3.2-1B": ((2048, 8192, 16, 32, 8, 64), 11_272_192),
    "Llama-3.1-8B": ((4096, 14336, 32, 32, 8, 128), 41_943_040),
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with tiny.quick_compilation():
        yield


@pytest.mark.parametrize("name", SIZES)
def test_the_parameters_are_as_many_as_published(name):
    (hidden, inner, layers, heads, kv_heads, size), count = SIZES[name]
    config = kvjax.ModelConfig(
        vocab_size=8, hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=size,
    )  # fmt: skip
    assert parameter_count(EraserConfig(), config) == count
    made = jax.eval_shape(lambda: init_eraser(EraserConfig(), jax.random.key(0), config))
    assert sum(leaf.size for leaf in jax.tree.leaves(made)) == count


def test_the_first_factor_is_random_and_the_second_zero():
    made = init_eraser(EraserConfig(), jax.random.key(0), tiny.CONFIG)
    assert EraserConfig().scale == 2.0
    for name, array in made.arrays.items():
        assert array.dtype == jnp.float32
        if name.endswith(".b"):
            assert not array.any()
        else:
            bound = array.shape[1] ** -0.5
            assert 0.9 * bound < float(jnp.abs(array).max()) <= bound
            assert abs(float(array.std()) - bound / 3**0.5) < 0.1 * bound


@pytest.mark.parametrize("name", ["qwen3", "biased"])
def test_adapters_are_a_change_of_the_weights(name):
    """x W + scale (x A) B = x (W + scale A B), in project and in finish."""
    model = random_model(name)
    adapters = Eraser(
        config=EraserConfig(rank=3, alpha=7.0),
        arrays={
            key: jax.random.normal(jax.random.fold_in(jax.random.key(1), i), shape) * 0.2
            for i, (key, shape) in enumerate(
                eraser_shapes(EraserConfig(rank=3), model.config).items()
            )
        },
    )
    changed = {
        name: array
        + (7.0 / 3 * (adapters.arrays[f"{short}.a"] @ adapters.arrays[f"{short}.b"])
           if (short := name.removeprefix("layers.")) in PROJECTIONS else 0.0)
        for name, array in model.parameters.items()
    }  # fmt: skip
    merged = kvjax.Decoder(model.config, changed)
    x = jax.random.normal(jax.random.key(2), (2, 5, model.config.hidden_size))
    rotation = model.rotation(jnp.broadcast_to(jnp.arange(5)[None], (2, 5)))
    low = jax.tree.map(lambda a: a[1], adapters.adapters)
    layers = [jax.tree.map(lambda a: a[1], m.layers) for m in (model, merged)]
    found, wanted = layers[0].project(x, *rotation, low), layers[1].project(x, *rotation)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    np.testing.assert_allclose(
        layers[0].finish(x, found.queries, low),
        layers[1].finish(x, found.queries),
        atol=1e-3,
    )
    without = layers[0].project(x, *rotation)
    assert not np.allclose(found.keys, without.keys, atol=0.1)


def test_without_adapters_a_layer_computes_nothing_more():
    layer = jax.tree.map(lambda a: a[0], tiny.model().layers)
    x, cos = jnp.zeros((1, 4, 32)), jnp.zeros((1, 4, 4))
    low = jax.tree.map(lambda a: a[0], eraser().adapters)

    def products(*adapters) -> int:
        def run(x):
            new = layer.project(x, cos, cos, *adapters)
            return layer.finish(x, new.queries, *adapters)

        return str(jax.make_jaxpr(run)(x)).count("dot_general")

    assert products() == products(None) == 7
    assert products(low) == 7 + 2 * 7


# Learning: a tiny text in which the answer follows from the context


PREFIX, SPAN, SUFFIX, QUESTION, ANSWER = 10, 6, 8, 3, 2
LENGTH = PREFIX + SPAN + SUFFIX


@functools.cache
def confident() -> kvjax.Decoder:
    """A head as sharp as a trained model's, so that an answer can become certain."""
    given = tiny.model().parameters
    return kvjax.Decoder(tiny.CONFIG, given | {"lm_head": 4 * given["lm_head"]})


@functools.cache
def loss_of():
    """Cross entropy of an answer behind the edited cache, as a function of the eraser."""
    tokens = jnp.asarray(tiny.tokens(5)[:1, :LENGTH])
    model = confident()
    cache = kvjax.prefill(model, tokens, room=QUESTION + ANSWER)[1]
    spans = jnp.array([[[PREFIX, PREFIX + SPAN]]])
    extent = Extent(span=SPAN + 3, prefix=PREFIX, suffix=SUFFIX)
    question = jnp.asarray(tiny.tokens(6)[:1, :QUESTION])
    answer = jnp.asarray(tiny.tokens(7)[:1, :ANSWER])
    lengths = jnp.full(1, QUESTION)

    def edited(adapters):
        return apply(model, adapters, cache, tokens, spans, KVEraser(), extent)

    def loss(adapters):
        logits, asked = decoding.extend(model, edited(adapters), question, lengths)
        return -jnp.mean(kvjax.log_likelihood(model, asked, logits, answer))

    return loss, edited, question, answer


def steps(start: Eraser, count: int, rate: float) -> tuple[Eraser, list[float]]:
    optimizer = optax.adam(rate)

    @jax.jit
    def step(adapters, state):
        loss, grads = jax.value_and_grad(loss_of()[0])(adapters)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it
            updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, loss

    state, losses = optimizer.init(start), []
    for _ in range(count):
        start, state, loss = step(start, state)
        losses.append(float(loss))
    return start, losses


def test_gradients_reach_what_steering_states_depend_on():
    """At B = 0: B of k and v everywhere, B of the others below the last layer, no A."""
    start = init_eraser(EraserConfig(rank=4), jax.random.key(0), tiny.CONFIG)
    first = jax.grad(loss_of()[0])(start)
    for name in PROJECTIONS:
        moved = np.abs(np.asarray(first.arrays[f"{name}.b"])).max(axis=(1, 2)) > 0
        assert moved.tolist() == [True, True, name in ("k_proj", "v_proj")], name
        assert not np.asarray(first.arrays[f"{name}.a"]).any(), name
    assert all(np.isfinite(np.asarray(a)).all() for a in first.arrays.values())

    after, _ = steps(start, 1, 1e-2)
    second = jax.grad(loss_of()[0])(after)
    for name in PROJECTIONS:
        moved = np.abs(np.asarray(second.arrays[f"{name}.a"])).max(axis=(1, 2)) > 0
        assert moved.tolist() == [True, True, name in ("k_proj", "v_proj")], name


def test_one_sample_is_learnt_by_heart():
    start = init_eraser(EraserConfig(rank=8), jax.random.key(0), tiny.CONFIG)
    loss, edited, question, answer = loss_of()

    def said(adapters) -> np.ndarray:
        logits, asked = kvjax.extend(confident(), edited(adapters), question)
        return np.asarray(kvjax.generate(confident(), asked, logits, max_new_tokens=2).tokens)

    assert (said(start) != np.asarray(answer)).any()
    trained, losses = steps(start, 80, 1e-2)
    assert losses[0] > 5
    assert losses[-1] < 0.05
    assert float(loss(trained)) < 0.05
    np.testing.assert_array_equal(said(trained), answer)

    before, after = edited(start), edited(trained)
    outside = np.r_[0:PREFIX, PREFIX + SPAN : LENGTH]
    np.testing.assert_array_equal(after.keys[:, :, :, outside], before.keys[:, :, :, outside])
    np.testing.assert_array_equal(after.values[:, :, :, outside], before.values[:, :, :, outside])


# Files


def export(path, model=None, adapters=None, **options):
    save_eraser(path, adapters or eraser(), model or tiny.model(), backbone="tiny", **options)


def test_an_exported_eraser_is_read_again(tmp_path):
    export(tmp_path)
    found = load_eraser(tiny.model(), tmp_path)
    assert found.config == eraser().config
    for name, array in eraser().arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
    assert load_eraser(tiny.model("bfloat16"), tmp_path).config == found.config


def test_an_eraser_may_be_stored_in_16_bits(tmp_path):
    export(tmp_path, stored="float16")
    found = load_eraser(tiny.model(), tmp_path)
    for name, array in eraser().arrays.items():
        assert found.arrays[name].dtype == jnp.float32
        rounded = array.astype(jnp.float16).astype(jnp.float32)
        np.testing.assert_array_equal(found.arrays[name], rounded)


def test_an_eraser_of_another_backbone_is_refused(tmp_path):
    export(tmp_path)
    other = kvjax.Decoder.random(tiny.CONFIG, jax.random.key(99))
    with pytest.raises(ValueError, match=r"trained for tiny .*the model given has fingerprint"):
        load_eraser(other, tmp_path)


def test_modules_of_another_kind_and_damaged_ones_are_refused(tmp_path):
    export(tmp_path / "eraser")
    card = modules.read_card(tmp_path / "eraser")
    modules.save_module(tmp_path / "gates", {}, dataclasses.replace(card, kind="retention"))
    with pytest.raises(ValueError, match="kind 'retention'; needed is 'eraser'"):
        load_eraser(tiny.model(), tmp_path / "gates")
    with pytest.raises(ValueError, match=r"an eraser.*kvjax\.load_eraser"):
        kvjax.load_policy(tmp_path / "eraser", tiny.model())
    fewer = {name: a for name, a in eraser().arrays.items() if name != "v_proj.b"}
    modules.save_module(tmp_path / "cut", fewer, card)
    with pytest.raises(ValueError, match=r"cut: eraser: without 'v_proj\.b'"):
        load_eraser(tiny.model(), tmp_path / "cut")
    with pytest.raises(FileNotFoundError, match="they ship for smollm2-135m-instruct"):
        load_eraser(tiny.model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0: allowed are integers >= 1"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"targets": ()}, "targets="),
        ({"targets": ("q_proj", "lm_head")}, "lm_head.*allowed are some of q_proj"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EraserConfig(**options)


def test_arrays_that_do_not_fit_are_refused():
    extra = eraser().arrays | {"lm_head.a": jnp.zeros((3, 1, 1))}
    with pytest.raises(ValueError, match=r"eraser: with 'lm_head\.a'"):
        check_eraser(Eraser(config=eraser().config, arrays=extra), tiny.CONFIG)
    rounded = {name: a.astype(jnp.bfloat16) for name, a in eraser().arrays.items()}
    with pytest.raises(ValueError, match=r"is bfloat16 of shape .*needed is float32"):
        check_eraser(Eraser(config=eraser().config, arrays=rounded), tiny.CONFIG)
    with pytest.raises(ValueError, match=r"is float32 of shape .*needed is float32 of shape"):
        check_eraser(eraser(), dataclasses.replace(CONFIGS["llama"], intermediate_size=64))


def test_fewer_projections_may_be_adapted():
    config = EraserConfig(rank=4, targets=("k_proj", "v_proj"))
    made = init_eraser(config, jax.random.key(0), tiny.CONFIG)
    assert sorted(made.adapters) == ["k_proj", "v_proj"]
    check_eraser(made, tiny.CONFIG)
