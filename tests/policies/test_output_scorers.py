"""CAOTE, CriticalKV, Expected Attention, CAKE and KVzip against their definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies import Observation, Scorer, State, policy
from kvjax.policies.caote import CAOTE
from kvjax.policies.criticalkv import CriticalKV, criticalkv
from kvjax.policies.kvzip import KVzip, kvzip_chunk_scores
from kvjax.policies.snapkv import SnapKV
from tests.policies import golden_output
from tests.policies.observations import make_observation, mirror, one_row, with_garbage
from tests.policies.scoring import assert_close, scores_of

WINDOW, BUDGET = 5, 12
LAYERS = {
    "ragged": {"lengths": [31, 13]},
    "shorter_than_window": {"lengths": [3, 1]},
    "cached": {"cached": 16, "lengths": [15, 4], "holes": 0.2},
    "three_queries_per_head": {"num_heads": 6, "holes": 0.1, "dtype": jnp.bfloat16},
}
METHODS: dict[str, tuple[Scorer, Callable[[SimpleNamespace], np.ndarray]]] = {
    "caote": (
        policy("caote", window=WINDOW).scorer,
        lambda o: golden_output.caote(o, window=WINDOW),
    ),
    "caote-fast": (
        policy("caote", window=WINDOW, fast=True, kernel=1).scorer,
        lambda o: golden_output.caote(o, window=WINDOW, fast=True, kernel=1),
    ),
    "expected-attention": (
        policy("expected-attention", horizon=9).scorer,
        lambda o: golden_output.expected_attention(o, horizon=9),
    ),
    "expected-attention-mean": (
        policy("expected-attention", use_covariance=False, use_vnorm=False, epsilon=0.01).scorer,
        lambda o: golden_output.expected_attention(
            o, use_covariance=False, use_vnorm=False, epsilon=0.01
        ),
    ),
    "cake": (
        policy("cake", window=WINDOW).scorer,
        lambda o: golden_output.cake(o, window=WINDOW),
    ),
}


def observed(seed: int = 11, **options: object) -> Observation:
    settings = {"slots": 31, "window": WINDOW} | options
    observation = make_observation(seed, **settings)
    batch = observation.next_position.shape[0]
    return dataclasses.replace(observation, budget=jnp.full(batch, BUDGET, jnp.int32))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_the_definition(method: str, layer: str) -> None:
    scorer, define = METHODS[method]
    observation = observed(**LAYERS[layer])
    scores = scores_of(scorer, observation)
    expected = np.array([define(mirror(observation, row)) for row in range(len(scores))])
    assert_close(scores, expected, observation.valid, 5e-5)


EVERY = {name: scorer for name, (scorer, _) in METHODS.items()} | {
    "criticalkv": CriticalKV(base=SnapKV(window=WINDOW))
}


@pytest.mark.parametrize("method", ["caote", "expected-attention", "cake", "criticalkv"])
def test_rows_are_independent_and_empty_slots_do_not_matter(method: str) -> None:
    scorer = EVERY[method]
    observation = observed(12, batch=3, lengths=[31, 17, 2], holes=0.1)
    together = scores_of(scorer, observation)
    for row in range(3):
        alone = one_row(observation, row)
        assert_close(together[row], scores_of(scorer, alone)[0], alone.valid[0], 1e-6)
    dirty = scores_of(scorer, with_garbage(observation, np.nan))
    assert_close(dirty, together, observation.valid, 1e-6)


@pytest.mark.parametrize("method", ["caote", "expected-attention", "cake", "criticalkv"])
def test_degenerate_layers_have_finite_scores(method: str) -> None:
    usual = observed(13, lengths=[31, 1])
    for keys in (jnp.zeros_like(usual.keys), usual.keys * 1e4):
        scores = scores_of(EVERY[method], dataclasses.replace(usual, keys=keys))
        assert np.all(np.isfinite(scores[np.asarray(usual.valid)]))


@pytest.mark.parametrize("budget", [1, 4, 12, 31])
def test_critical_entries_come_in_two_stages(budget: int) -> None:
    observation = observed(14, lengths=[31, 20], num_heads=4)
    observation = dataclasses.replace(observation, budget=jnp.full(2, budget, jnp.int32))
    base = SnapKV(window=WINDOW)
    base_scores = scores_of(base, observation)
    scores = scores_of(CriticalKV(base=base), observation)
    for row in range(2):
        o = mirror(observation, row)
        first, second = golden_output.critical_stages(
            o, base_scores[row].astype(float), budget=budget, recent=WINDOW
        )
        for head, chosen in enumerate(first):
            valid = np.flatnonzero(o.positions[head] >= 0)
            rest = [s for s in valid if s not in chosen]
            np.testing.assert_allclose(
                scores[row, head, rest], second[head, rest], rtol=1e-4, atol=1e-9
            )
            if chosen and rest:
                assert scores[row, head, list(chosen)].min() > scores[row, head, rest].max()
            ranked = sorted(chosen, key=lambda s: base_scores[row, head, s])
            assert np.all(np.diff(scores[row, head, ranked]) >= 0)


def test_criticalkv_takes_over_what_its_base_declares() -> None:
    scorer = criticalkv(base="expected-attention")
    assert scorer.needs == {"queries_pre_rope", "output_projection"}
    assert scorer.protection().sinks == 4
    assert policy("criticalkv").window == 32
    with pytest.raises(ValueError, match="keeps everything"):
        criticalkv(base="full")


def test_scorers_that_need_the_budget_say_so() -> None:
    observation = dataclasses.replace(observed(), budget=None)
    with pytest.raises(ValueError, match="budget"):
        scores_of(CriticalKV(base=CAOTE(window=WINDOW)), observation)


@pytest.mark.parametrize("tau", [(1.0, 1.0), (1.6, 0.4)])
def test_cake_prefers_layers_whose_attention_is_wide_and_restless(tau: tuple) -> None:
    scorer = policy("cake", window=WINDOW, tau1=tau[0], tau2=tau[1])
    observation = observed(15, batch=3, lengths=[31, 17, 2], holes=0.1)
    preference = scorer.allocator.preference(observation)
    expected = [
        golden_output.cake_preference(
            mirror(observation, row), window=WINDOW, tau1=tau[0], tau2=tau[1]
        )
        for row in range(3)
    ]
    np.testing.assert_allclose(preference, expected, rtol=1e-4)


@pytest.mark.parametrize("block", [3, 128])
def test_replay_scores_are_those_of_the_definition(block: int) -> None:
    rng = np.random.default_rng(0)
    keys, replay_keys = rng.normal(size=(2, 2, 20, 8)), rng.normal(size=(2, 2, 7, 8))
    queries = rng.normal(size=(2, 4, 7, 8)) * 2
    positions = np.broadcast_to(np.arange(20), (2, 2, 20)).copy()
    positions[0, 1, 3:6] = -1
    keys[0, 1, 3:6] = np.nan
    query_positions = np.array([np.arange(20, 27), [20, 21, 22, -1, -1, -1, -1]])
    chunk = np.array([[2, 15], [10, 20]])
    scores = kvzip_chunk_scores(
        jnp.asarray(queries, jnp.float32),
        jnp.asarray(query_positions, jnp.int32),
        jnp.asarray(replay_keys, jnp.float32),
        jnp.asarray(keys, jnp.float32),
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(chunk, jnp.int32),
        first_tokens=4,
        block=block,
    )
    for row in range(2):
        expected = golden_output.kvzip(
            queries[row],
            query_positions[row],
            replay_keys[row],
            keys[row],
            positions[row],
            tuple(chunk[row]),
            4,
        )
        np.testing.assert_allclose(scores[row], expected, atol=1e-6)


def test_kvzip_ranks_by_what_the_replay_left_in_the_state() -> None:
    observation = observed(16, lengths=[31, 20])
    replay = jnp.asarray(np.random.default_rng(1).random(observation.positions.shape), jnp.float32)
    state = State(slots={"replay_score": replay})
    scores = np.asarray(KVzip().score(observation, None, state))
    first = np.asarray((observation.positions >= 0) & (observation.positions < 4))
    np.testing.assert_array_equal(scores, np.where(first, 1.0, np.asarray(replay)))
    assert policy("kvzip").allocator.crosses_layers
    assert not policy("kvzip", uniform=True).allocator.crosses_layers


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        ("criticalkv", "fraction", 2.0),
        ("expected-attention", "horizon", 0),
        ("expected-attention", "epsilon", -1.0),
        ("kvzip", "chunk_tokens", 0),
        ("cake", "tau1", 0.0),
        ("cake", "window", 0),
        ("caote", "kernel", 2),
        ("ada-snapkv", "floor", 1.5),
    ],
)
def test_options_outside_what_is_allowed_are_refused(
    method: str, option: str, value: object
) -> None:
    with pytest.raises(ValueError, match=f"{option}=.*allowed"):
        policy(method, **{option: value})
