"""Retention gates, their utility, and what they make the cache keep."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.learned.retention import (
    GateConfig,
    init_gates,
    initial_bias,
    log_beta,
    log_utility,
    per_layer,
)
from tests import tiny

SIZES = {"num_layers": 3, "num_kv_heads": 2, "hidden_size": 12, "bias": 4.0}
CONFIGS = (
    GateConfig(kind="rg", width=7),
    GateConfig(kind="rg10", width=7),
    GateConfig(kind="rg10", width=7, share_output=False),
    GateConfig(kind="rg10", width=7, tie_heads=True),
)


def layer_of(gates, layer):
    return {name: array[layer] for name, array in gates.items()}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gates_compute_what_the_papers_say(config):
    gates = per_layer(config, init_gates(config, jax.random.key(0), **SIZES), 3)
    hidden = np.random.default_rng(1).normal(size=(2, 5, 12))
    for index in range(3):
        own = {name: np.asarray(a, np.float64) for name, a in layer_of(gates, index).items()}

        def silu(x):
            return x / (1 + np.exp(-x))

        u = silu(hidden @ own["w1"] + own["b1"])
        if config.kind == "rg10":
            u = silu(u @ own["w2"] + own["b2"])
        if config.tie_heads:
            y = np.stack([u[..., 64 * h : 64 * h + 64] @ own["w3"] for h in range(2)], -1)
        else:
            y = u @ own["w3"]
        expected = -np.log1p(np.exp(-(y + own["b3"]))).transpose(0, 2, 1)
        found = log_beta(layer_of(gates, index), jnp.asarray(hidden, jnp.float32), 2)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_layers_share_the_last_projection_and_nothing_else():
    shared = init_gates(CONFIGS[1], jax.random.key(0), **SIZES)
    assert shared["w3"].shape == (7, 2) and shared["b3"].shape == (2,)
    assert shared["w1"].shape == (3, 12, 7) and shared["w2"].shape == (3, 7, 7)
    apart = init_gates(CONFIGS[2], jax.random.key(0), **SIZES)
    assert apart["w3"].shape == (3, 7, 2) and apart["b3"].shape == (3, 2)


@pytest.mark.parametrize(
    ("kind", "hidden", "layers", "heads", "millions"),
    [("rg", 2560, 36, 8, 47.35), ("rg", 4096, 32, 8, 67.3), ("rg10", 2560, 36, 8, 56.7)],
)
def test_sizes_are_those_of_the_released_gates(kind, hidden, layers, heads, millions):
    shapes = jax.eval_shape(
        lambda key: init_gates(
            GateConfig(kind=kind),
            key,
            num_layers=layers,
            num_kv_heads=heads,
            hidden_size=hidden,
            bias=18.0,
        ),
        jax.random.key(0),
    )
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert count / 1e6 == pytest.approx(millions, abs=0.05)


def test_the_initial_bias_keeps_every_length_nearly_undecayed():
    assert initial_bias(32_768) == pytest.approx(18.0, abs=0.01)
    for length in (512, 2048, 131_072):
        assert length * math.exp(-initial_bias(length)) == pytest.approx(5e-4, rel=0.01)


@pytest.mark.parametrize("lookahead", [1, 2, 128])
def test_utility_is_the_sum_of_future_retention(lookahead):
    rates = np.array([-1e-4, -0.01, -0.69, -5.0])
    ages = np.array([1.0, 7.0, 90.0])
    expected = np.log(np.exp((ages[:, None, None] + np.arange(lookahead)) * rates[:, None]).sum(-1))
    grid = jnp.broadcast_arrays(
        jnp.asarray(rates, jnp.float32)[None], jnp.asarray(ages, jnp.float32)[:, None]
    )
    found = log_utility(*grid, lookahead)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_utility_stays_finite_where_beta_rounds_to_one():
    rates = jnp.array([0.0, -1e-30, -1.5e-8, -1e4], jnp.float32)
    for lookahead in (1, 2, 4096):
        found = np.asarray(log_utility(rates, jnp.full(4, 9.0, jnp.float32), lookahead))
        assert np.all(np.isfinite(found)) and np.all(np.diff(found) <= 1e-6)
        assert found[0] == pytest.approx(math.log(lookahead), abs=1e-5)


def constant(rate_of_layer):
    """Gates of the tiny model whose rate depends on the layer only."""
    gates = tiny.retention_gates()
    still = {name: jnp.zeros_like(array) for name, array in gates.items()}
    # log sigmoid(b) = rate
    bias = [-math.log(math.expm1(-rate)) for rate in rate_of_layer]
    still["b3"] = jnp.broadcast_to(jnp.asarray(bias, jnp.float32)[:, None], gates["b3"].shape)
    return still


@pytest.mark.parametrize("name", ["retention-local", "retention-global"])
def test_equal_rates_keep_a_sliding_window(name):
    model, prompt = tiny.model(num_layers=2), tiny.tokens(rows=1)
    gates = {key: array[:2] for key, array in constant([-0.3] * 3).items()}
    policy = kvjax.policy(name, decode_interval=0)
    _, cache = kvjax.prefill(model, prompt, policy=policy, budget=9, params=gates)
    held = np.asarray(cache.positions)
    newest = set(range(prompt.shape[1] - 9, prompt.shape[1]))
    for layer, head in np.ndindex(held.shape[0], held.shape[2]):
        row = held[layer, 0, head]
        assert set(row[row >= 0].tolist()) == newest


def test_a_global_budget_moves_to_the_layers_that_retain():
    model = tiny.model(num_layers=2)
    gates = {name: array[:2] for name, array in constant([-1e-4, -1.0, -1.0]).items()}
    prompt = tiny.tokens(rows=1)
    policy = kvjax.policy("retention-global", decode_interval=0, ceiling=None)
    _, cache = kvjax.prefill(model, prompt, policy=policy, budget=10, params=gates)
    lengths = np.asarray(cache.lengths)[:, 0]
    assert lengths.sum() == 10 * lengths.size
    assert lengths[0].min() > 15 and lengths[1].max() < 5


def test_a_compressed_context_does_not_depend_on_the_question():
    model, policy = tiny.model(), kvjax.policy("retention-global")
    gates = tiny.retention_gates()
    first = tiny.tokens(rows=1)
    seen = []
    for question in ([5, 6, 7], [50, 60, 70, 80]):
        _, cache = kvjax.prefill(model, first, policy=policy, budget=12, params=gates)
        seen.append(np.asarray(cache.positions))
        kvjax.extend(model, cache, [question], policy=policy, budget=12, params=gates)
    assert np.array_equal(*seen)


def test_rates_stay_with_their_entries_through_chunks_and_decoding():
    model, gates = tiny.model(), tiny.retention_gates()
    prompt = tiny.tokens(rows=1)
    whole = kvjax.policy("retention-local", decode_interval=4)
    chunked = dataclasses.replace(
        whole, schedule=dataclasses.replace(whole.schedule, prefill="chunked", chunk=16)
    )
    for policy in (whole, chunked):
        logits, cache = kvjax.prefill(model, prompt, policy=policy, budget=40, params=gates)
        out = kvjax.generate(
            model, cache, logits, max_new_tokens=10, policy=policy, budget=40, params=gates
        )
        rates = np.asarray(out.cache.policy_state.slots["log_beta"])
        valid = np.asarray(out.cache.positions) >= 0
        assert np.all(rates[valid] < 0)
    # An entry of the first chunk has the rate that its token got at birth.
    _, kept = kvjax.prefill(model, prompt, policy=whole, budget=1.0, params=gates)
    born = np.asarray(kept.policy_state.slots["log_beta"])[0, 0]
    place = np.asarray(kept.positions)[0, 0]
    _, later = kvjax.prefill(model, prompt, policy=chunked, budget=30, params=gates)
    for head in range(born.shape[0]):
        known = dict(zip(place[head].tolist(), born[head].tolist(), strict=True))
        positions = np.asarray(later.positions)[0, 0, head]
        found = np.asarray(later.policy_state.slots["log_beta"])[0, 0, head]
        for position, rate in zip(positions, found, strict=True):
            if 0 <= position < 16:  # later tokens saw an evicted cache
                assert rate == pytest.approx(known[int(position)], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead": 0}, "lookahead=0: allowed are integers >= 1"),
        ({"ceiling": 0.5}, "ceiling"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kvjax.policy("retention-global", **options)


def test_without_gates_it_says_where_they_come_from():
    with pytest.raises(ValueError, match=r"kvjax\.policy_params\(model, policy\)"):
        kvjax.prefill(tiny.model(), tiny.tokens(rows=1), policy="retention-local", budget=9)
    with pytest.raises(
        FileNotFoundError, match="no weights of 'retention-local' for this backbone"
    ):
        kvjax.policy_params(tiny.model(), "retention-local")
