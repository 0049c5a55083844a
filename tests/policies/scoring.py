"""Runs a scorer on an observation made by hand."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.policies import Observation, Scorer, State


def fresh_state(scorer: Scorer, observation: Observation) -> State:
    """The state of a cache in which every entry is new."""
    lead, batch = observation.positions.shape, observation.positions.shape[:1]
    scorer = scorer.for_model(0, observation.keys.shape[-1])
    return State(
        slots={
            name: jnp.full((*lead, *field.shape), field.fill, field.dtype)
            for name, field in scorer.slot_fields().items()
        },
        layer={
            name: jnp.full((*batch, *field.shape), field.fill, field.dtype)
            for name, field in scorer.layer_fields().items()
        },
    )


@partial(jax.jit, static_argnames="scorer")
def _score(scorer: Scorer, observation: Observation, params: object, state: State) -> jax.Array:
    return scorer.score(observation, params, scorer.update(observation, params, state))


def scores_of(scorer: Scorer, observation: Observation, params: object = None) -> np.ndarray:
    """[B, K, S] scores after one call on an empty cache."""
    return np.asarray(_score(scorer, observation, params, fresh_state(scorer, observation)))


def assert_close(
    actual: np.ndarray, expected: np.ndarray, where: np.ndarray, tolerance: float = 2e-5
) -> None:
    """Equal on the valid entries, relative to the largest expected score among them."""
    where = np.asarray(where)
    actual, expected = np.asarray(actual)[where], np.asarray(expected)[where]
    assert np.all(np.isfinite(actual))
    scale = max(float(np.max(np.abs(expected), initial=0.0)), 1e-12)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=tolerance)
