"""The indexer's parts against NumPy in float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.learned.indexer import (
    IndexerConfig,
    head_gates,
    importance,
    index_keys,
    index_queries,
    init_indexer,
)

SIZES = {"num_layers": 3, "num_heads": 6, "head_dim": 4, "hidden_size": 12}
CONFIG = IndexerConfig(heads=2, size=5)


def normalised(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def random_indexer(layer=1):
    """One layer's parameters, scales of the normalisations included, in float32 and float64."""
    indexer = init_indexer(CONFIG, jax.random.key(0), **SIZES)
    for index, name in enumerate(("q_norm", "k_norm")):
        indexer[name] = 1 + 0.5 * jax.random.normal(jax.random.key(index), indexer[name].shape)
    own = {name: array[layer] for name, array in indexer.items()}
    return own, {name: np.asarray(array, np.float64) for name, array in own.items()}


def inputs(batch=2, tokens=7):
    rng = np.random.default_rng(1)
    return rng.normal(size=(batch, 6, tokens, 4)), rng.normal(size=(batch, tokens, 12))


def definition(exact, queries, hidden):
    """Index queries [B, T, I, P], keys [B, T, P] and gates [B, T, I]."""
    batch, _, tokens, _ = queries.shape
    flat = np.concatenate(list(queries.transpose(1, 0, 2, 3)), axis=-1)  # heads side by side
    q = normalised((flat @ exact["wq"]).reshape(batch, tokens, 2, 5), exact["q_norm"])
    k = normalised(hidden @ exact["wk"], exact["k_norm"])
    return q, k, hidden @ exact["wg"] / math.sqrt(2 * 5)


def test_queries_keys_and_gates_are_what_the_paper_says():
    own, exact = random_indexer()
    queries, hidden = inputs()
    x = jnp.asarray(hidden, jnp.float32)
    q, k, gates = definition(exact, queries, hidden)
    found = index_queries(own, jnp.asarray(queries, jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, q.transpose(0, 2, 1, 3), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(index_keys(own, x), k, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head_gates(own, x), gates.transpose(0, 2, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "identity"])
@pytest.mark.parametrize("near", [0, 3])
def test_importance_is_the_largest_gated_sum_over_later_queries(activation, near):
    own, exact = random_indexer()
    queries, hidden = inputs()
    q, k, gates = definition(exact, queries, hidden)
    wanted = np.full((2, 7), -np.inf)
    for b, t in np.ndindex(2, 7):
        for s in range(t + near, 7):
            z = q[b, s] @ k[b, t]
            z = np.maximum(z, 0) if activation == "relu" else z
            wanted[b, t] = max(wanted[b, t], gates[b, s] @ z)
    x, places = jnp.asarray(hidden, jnp.float32), jnp.tile(jnp.arange(7)[None], (2, 1))
    found = importance(
        index_queries(own, jnp.asarray(queries, jnp.float32)),
        head_gates(own, x),
        index_keys(own, x),
        places,
        places,
        activation=activation,
        near=near,
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_bfloat16_inputs_are_widened_before_they_are_multiplied():
    own, _ = random_indexer()
    queries, hidden = (jnp.asarray(a, jnp.bfloat16) for a in inputs())
    wide = (a.astype(jnp.float32) for a in (queries, hidden))
    for part, given, exact in zip(
        (index_queries, index_keys), (queries, hidden), wide, strict=True
    ):
        np.testing.assert_array_equal(part(own, given), part(own, exact))


@pytest.mark.parametrize(
    ("heads", "head_dim", "sizes"), [(32, 128, (8, 16)), (9, 64, (2, 8)), (2, 32, (1, 8))]
)
def test_sizes_follow_the_backbone(heads, head_dim, sizes):
    config = IndexerConfig()
    assert (config.heads_of(heads), config.size_of(head_dim)) == sizes


def test_parameters_per_layer_of_an_8b_model_are_those_counted_from_the_paper():
    shapes = jax.eval_shape(
        lambda key: init_indexer(
            IndexerConfig(), key, num_layers=1, num_heads=32, head_dim=128, hidden_size=4096
        ),
        jax.random.key(0),
    )
    counts = {name: math.prod(leaf.shape) for name, leaf in shapes.items()}
    assert counts == {"wq": 524_288, "wk": 65_536, "wg": 32_768, "q_norm": 16, "k_norm": 16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads=0: allowed are integers >= 1"),
        ({"near": -1}, "near=-1: allowed are integers >= 0"),
        ({"activation": "gelu"}, "gelu"),
    ],
)
def test_bad_shapes_are_refused(options, message):
    with pytest.raises(Exception, match=message):
        IndexerConfig(**options)
