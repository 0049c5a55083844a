"""Rules that hold for every scorer in the registry, whatever it computes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies import Observation, Scorer, policy
from tests.policies.observations import make_observation, one_row, with_garbage
from tests.policies.scoring import assert_close, scores_of

# Sizes that make every branch of a method run within 31 slots.
OPTIONS: dict[str, dict[str, object]] = {
    "chunkkv": {"window": 5, "chunk_size": 4},
    "compactor": {"chunk_size": 6},
    "duoattention": {"streaming_sinks": 3, "streaming_recent": 5, "length": 40},
    "lagkv": {"lag": 5, "skip": 2},
    "rkv": {"window": 4},
    "snapkv": {"window": 5},
}
METHODS = (
    "chunkkv",
    "compactor",
    "duoattention",
    "h2o",
    "keydiff",
    "keydiff-block",
    "knorm",
    "lagkv",
    "leverage",
    "qfilters",
    "random",
    "rkv",
    "snapkv",
    "streaming",
    "tova",
)
every_method = pytest.mark.parametrize("method", METHODS)


def scorer_of(method: str) -> Scorer:
    scorer = policy(method, **OPTIONS.get(method, {})).scorer
    assert scorer is not None
    return scorer


def params_of(method: str) -> object:
    if method != "qfilters":
        return None
    return {"filters": jnp.asarray(np.random.default_rng(7).normal(size=(2, 8)), jnp.float32)}


def observation_for(scorer: Scorer, **options: object) -> Observation:
    return make_observation(11, slots=31, window=max(scorer.window, 1), **options)


@every_method
def test_a_row_of_a_batch_equals_the_row_alone(method: str) -> None:
    scorer, params = scorer_of(method), params_of(method)
    observation = observation_for(scorer, batch=3, lengths=[31, 17, 2], holes=0.1)
    together = scores_of(scorer, observation, params)
    for row in range(3):
        alone = one_row(observation, row)
        assert_close(together[row], scores_of(scorer, alone, params)[0], alone.valid[0], 1e-6)


@every_method
def test_a_padded_row_equals_the_row_without_padding(method: str) -> None:
    scorer, params = scorer_of(method), params_of(method)
    padded = one_row(observation_for(scorer, lengths=[17, 31]), 0)
    per_slot = {"keys": 2, "values": 2, "positions": 2, "column_attention": 2}
    per_token = {"new_positions": 1, "queries_pre_rope": 2, "hidden": 1}
    trimmed = dataclasses.replace(
        padded,
        **{
            name: jax.lax.slice_in_dim(getattr(padded, name), 0, 17, axis=axis)
            for name, axis in (per_slot | per_token).items()
        },
    )
    long, short = scores_of(scorer, padded, params), scores_of(scorer, trimmed, params)
    assert_close(long[0, :, :17], short[0], trimmed.valid[0], 1e-5)


@every_method
@pytest.mark.parametrize("garbage", [3e4, -1e30, np.nan])
def test_what_empty_slots_hold_does_not_matter(method: str, garbage: float) -> None:
    scorer, params = scorer_of(method), params_of(method)
    observation = observation_for(scorer, cached=10, lengths=[21, 9], holes=0.3)
    expected = scores_of(scorer, observation, params)
    actual = scores_of(scorer, with_garbage(observation, garbage), params)
    assert_close(actual, expected, observation.valid, 1e-6)


@every_method
def test_scores_are_finite_for_degenerate_layers(method: str) -> None:
    scorer, params = scorer_of(method), params_of(method)
    usual = observation_for(scorer, lengths=[31, 1])
    first = jnp.broadcast_to(usual.keys[:, :, :1], usual.keys.shape)
    for keys, values in (
        (usual.keys, usual.values),
        (first, first),
        (jnp.zeros_like(usual.keys), jnp.zeros_like(usual.values)),
        (usual.keys * 1e4, usual.values * 1e4),
    ):
        scores = scores_of(scorer, dataclasses.replace(usual, keys=keys, values=values), params)
        assert np.all(np.isfinite(scores[np.asarray(usual.valid)]))


@every_method
def test_a_row_without_any_token_is_not_nan(method: str) -> None:
    scorer, params = scorer_of(method), params_of(method)
    usual = observation_for(scorer)
    nothing = dataclasses.replace(
        usual,
        positions=jnp.full_like(usual.positions, -1),
        new_positions=jnp.full_like(usual.new_positions, -1),
        query_positions=jnp.full_like(usual.query_positions, -1),
        next_position=jnp.zeros_like(usual.next_position),
        column_attention=jnp.zeros_like(usual.column_attention),
    )
    assert not np.any(np.isnan(scores_of(scorer, nothing, params)))


@every_method
def test_bfloat16_layers_are_scored_in_float32(method: str) -> None:
    scorer, params = scorer_of(method), params_of(method)
    observation = observation_for(scorer, dtype=jnp.bfloat16, lengths=[31, 12])
    as_float32 = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, observation
    )
    scores = scores_of(scorer, observation, params)
    assert scores.dtype == np.float32
    # Leverages near 1 and their standardised form lose what the order of summation moves.
    assert_close(scores, scores_of(scorer, as_float32, params), observation.valid, 1e-4)


@every_method
def test_only_declared_needs_are_read(method: str) -> None:
    scorer, params = scorer_of(method), params_of(method)
    observation = observation_for(scorer)
    fields = {
        "queries": ("queries", "query_positions"),
        "queries_pre_rope": ("queries_pre_rope",),
        "hidden": ("hidden",),
        "column_attention": ("column_attention",),
        "output_projection": ("output_projection",),
    }
    withheld = {
        name: None for need, names in fields.items() if need not in scorer.needs for name in names
    }
    scores = scores_of(scorer, dataclasses.replace(observation, **withheld), params)
    np.testing.assert_array_equal(scores, scores_of(scorer, observation, params))
