"""Losses of frozen layers, differentiated as the layers are passed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from train.passes import differentiated_at_once

LAYERS, SIZE = 3, 5


def layered(at_once):
    """A scan over layers whose losses are weighted differently, and what stands beside them."""

    def loss(params, inputs, weights):
        def body(x, layer):
            own, weight = layer

            def inner(own):
                return jnp.sum(jnp.tanh(own["w"] * x) ** 2) + own["b"], x.sum()

            value, beside = differentiated_at_once(inner, own) if at_once else inner(own)
            return x + 1.0, (weight * value, beside)

        _, (values, beside) = jax.lax.scan(body, inputs, (params, weights))
        return jnp.sum(jnp.sin(values)), beside

    return loss


def test_the_gradient_is_that_of_a_pass_back_whatever_is_made_of_the_losses():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (LAYERS, SIZE)),
        "b": jax.random.normal(keys[1], (LAYERS,)),
    }
    arguments = (params, jax.random.normal(keys[2], (SIZE,)), jnp.array([0.5, 2.0, -3.0]))
    (value, beside), found = jax.value_and_grad(layered(True), has_aux=True)(*arguments)
    (wanted_value, wanted), gradient = jax.value_and_grad(layered(False), has_aux=True)(*arguments)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    np.testing.assert_array_equal(beside, wanted)
    for name in params:
        assert np.abs(gradient[name]).min() > 1e-3
        np.testing.assert_allclose(found[name], gradient[name], rtol=1e-5)


def test_nothing_of_a_layer_is_kept_for_a_pass_back():
    def temporaries(at_once, layers, size=1024):
        def loss(params, x):
            def body(x, own):
                def inner(own):
                    wide = jnp.tanh(own[:, None] * x[None])  # [8, size]
                    return jnp.sum(jnp.sin(wide) * jnp.cos(wide)), 0.0

                value, _ = differentiated_at_once(inner, own) if at_once else inner(own)
                return jnp.sin(x), value

            return jnp.sum(jax.lax.scan(body, x, params)[1] ** 2)

        shapes = (
            jax.ShapeDtypeStruct((layers, 8), jnp.float32),
            jax.ShapeDtypeStruct((size,), jnp.float32),
        )
        compiled = jax.jit(jax.grad(loss)).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = (temporaries(True, layers) for layers in (4, 64))
    assert many - few < 64 * 1024  # a layer's wide array alone has 32 KiB
    assert temporaries(False, 64) > 60 * 8 * 1024 * 4
