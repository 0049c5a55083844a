"""Scores are the same whether the kernels or the portable operations make them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import dispatch
from kvjax.policies.observation import State
from kvjax.policies.registry import policy
from tests.policies.observations import make_observation

NAMES = ("window_scores", "window_moments", "removal_error")


@pytest.mark.parametrize("name", ["snapkv", "tova", "cake", "restkv"])
def test_scores_through_the_tpu_kernels_equal_the_portable_ones(name, monkeypatch):
    pytest.importorskip("jax.experimental.pallas.tpu")
    options = {} if name == "tova" else {"window": 6}
    scorer = policy(name, **options).scorer
    o = make_observation(1, slots=60, cached=20, lengths=[40, 3], window=6, holes=0.2)
    o = dataclasses.replace(o, budget=jnp.full((2,), 20, jnp.int32))
    expected = scorer.score(o, None, State())
    chosen = ",".join(f"{operation}=mosaic_tpu" for operation in NAMES)
    monkeypatch.setenv(dispatch.VARIABLE, chosen)
    found = jax.jit(lambda o: scorer.score(o, None, State()))(o)
    valid = np.asarray(o.valid)
    np.testing.assert_allclose(
        np.asarray(found)[valid], np.asarray(expected)[valid], rtol=1e-5, atol=1e-6
    )
