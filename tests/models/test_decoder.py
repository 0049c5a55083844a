"""The decoder: stacked layers, one layout table, stable fingerprints."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.decoder import NO_WINDOW, Decoder
from kvjax.models.layout import layout
from tests.models.small import BASE, CONFIGS, random_model

TOKENS = np.arange(12, dtype=np.int32) * 7 % 300


def count_equations(model):
    def run(model, tokens):
        def body(x, layer):
            new = layer.project(x, *model.rotation(jnp.arange(6)[None]))
            return layer.finish(x, new.queries), None

        return model.logits(jax.lax.scan(body, model.embed(tokens), model.layers)[0])

    jaxpr = jax.make_jaxpr(run)(model, jnp.zeros((1, 6), jnp.int32))
    return len(str(jaxpr).splitlines())  # one line per equation, those of the scan included


def test_the_program_does_not_grow_with_depth():
    shallow = Decoder.abstract(dataclasses.replace(BASE, num_layers=2, windows=()))
    deep = Decoder.abstract(dataclasses.replace(BASE, num_layers=8, windows=()))
    assert count_equations(shallow) == count_equations(deep)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_leaf_is_a_row_of_the_layout_table(name):
    model = Decoder.abstract(CONFIGS[name], jnp.bfloat16)
    leaves = jax.tree.leaves(model)
    assert len(leaves) == len(layout(model.config)) == len(model.parameters)
    for row in layout(model.config):
        assert model.parameters[row.name].shape == row.shape
        assert model.parameters[row.name].dtype == jnp.bfloat16
    assert jax.tree.structure(model) == jax.tree.structure(random_model(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_stays_close_to_float32(name):
    exact = random_model(name)
    values = {key: value.astype(jnp.bfloat16) for key, value in exact.parameters.items()}
    rounded = Decoder(exact.config, values)
    assert rounded.embed(jnp.asarray(TOKENS)[None]).dtype == jnp.bfloat16
    x = rounded.embed(jnp.asarray(TOKENS)[None])
    near, far = rounded.logits(x), exact.logits(x.astype(jnp.float32))
    assert near.dtype == jnp.float32
    assert np.abs(np.asarray(near) - np.asarray(far)).mean() < 0.02


def test_output_projection_contracts_heads_like_the_layer_does():
    model = random_model()
    first = jax.tree.map(lambda leaf: leaf[0], model.layers)
    heads = jax.random.normal(jax.random.key(3), (1, 4, 5, 8))
    by_head = jnp.einsum("bhtd,hde->bte", heads, first.output_projection)
    merged = heads.transpose(0, 2, 1, 3).reshape(1, 5, 32) @ first.o_proj[...]
    np.testing.assert_allclose(by_head, merged, atol=1e-5)
    assert model.layers.output_projection.shape == (3, 4, 8, 32)


def test_windows_are_integers_for_a_scan():
    np.testing.assert_array_equal(random_model("qwen2").windows, [NO_WINDOW, 7, 7])
    assert random_model().windows.dtype == np.int32


def test_tokens_outside_the_vocabulary_are_not_silently_clamped():
    embedded = random_model().embed(jnp.array([[0, 300]]))
    assert not np.isnan(embedded[0, 0]).any() and np.isnan(embedded[0, 1]).all()


def test_random_weights_follow_the_key():
    one, two = (Decoder.random(BASE, jax.random.key(seed)) for seed in (0, 1))
    again = Decoder.random(BASE, jax.random.key(0))
    assert one.fingerprint() == again.fingerprint() != two.fingerprint()


def test_the_fingerprint_sees_config_and_every_parameter():
    model = random_model("biased")
    seen = {model.fingerprint()}
    for name, value in model.parameters.items():
        changed = Decoder(model.config, {**model.parameters, name: value * 1.01})
        seen.add(changed.fingerprint())
    longer = dataclasses.replace(model.config, max_length=4096)
    seen.add(Decoder(longer, model.parameters).fingerprint())
    assert len(seen) == len(model.parameters) + 2


def test_a_jitted_decoder_is_an_argument_and_not_a_constant():
    @jax.jit
    def embed(model, tokens):
        return model.embed(tokens)

    tokens = jnp.asarray(TOKENS)[None]
    one, two = random_model(), Decoder.random(BASE, jax.random.key(9))
    np.testing.assert_array_equal(embed(one, tokens), one.embed(tokens))
    np.testing.assert_array_equal(embed(two, tokens), two.embed(tokens))
    assert embed._cache_size() == 1


def test_missing_and_unknown_parameters_are_named():
    values = dict(random_model().parameters)
    values["layers.sinks"] = values.pop("norm")
    with pytest.raises(ValueError, match=r"missing \['norm'\], not known \['layers.sinks'\]"):
        Decoder(BASE, values)
