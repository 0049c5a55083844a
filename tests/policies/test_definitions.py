"""Every scorer against its definition in NumPy, over ragged, holed, cached and grouped layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.policies import Scorer, policy
from tests.policies import golden
from tests.policies.observations import make_observation, mirror
from tests.policies.scoring import assert_close, scores_of

LAYERS = {
    "full": {},
    "ragged": {"lengths": [31, 13]},
    "shorter_than_window": {"lengths": [3, 1]},
    "holes": {"lengths": [31, 20], "holes": 0.3},
    "cached": {"cached": 16, "lengths": [15, 4], "holes": 0.2},
    "one_query_per_head": {"num_heads": 2, "lengths": [31, 13]},
    "three_queries_per_head": {"num_heads": 6, "lengths": [31, 13], "holes": 0.1},
    "bfloat16": {"dtype": jnp.bfloat16, "lengths": [31, 13]},
}
FILTERS = np.random.default_rng(7).normal(size=(2, 8))

# name: the scorer with sizes that fit 31 slots, its definition, its params
METHODS: dict[str, tuple[Scorer, Callable[[SimpleNamespace], np.ndarray], object]] = {
    "random": (
        policy("random", seed=-5).scorer,
        lambda o: golden.random(o, seed=-5),
        None,
    ),
    "streaming": (policy("streaming").scorer, golden.streaming, None),
    "knorm": (policy("knorm").scorer, golden.knorm, None),
    "keydiff": (policy("keydiff").scorer, golden.keydiff, None),
    "h2o": (policy("h2o").scorer, golden.h2o, None),
    "tova": (policy("tova").scorer, golden.tova, None),
    "snapkv": (policy("snapkv", window=6).scorer, lambda o: golden.snapkv(o, window=6), None),
    "snapkv-max": (
        policy("snapkv", window=6, kernel=7, pooling="max").scorer,
        lambda o: golden.snapkv(o, window=6, kernel=7, pooling="max"),
        None,
    ),
    "chunkkv": (
        policy("chunkkv", window=5, chunk_size=4).scorer,
        lambda o: golden.chunkkv(o, window=5, chunk_size=4),
        None,
    ),
    "lagkv": (
        policy("lagkv", lag=5, skip=2).scorer,
        lambda o: golden.lagkv(o, lag=5, skip=2),
        None,
    ),
    "rkv": (policy("rkv", window=4).scorer, lambda o: golden.rkv(o, window=4), None),
    "qfilters": (
        policy("qfilters").scorer,
        lambda o: golden.qfilters(o, filters=FILTERS),
        {"filters": jnp.asarray(FILTERS, dtype=jnp.float32)},
    ),
    "leverage": (policy("leverage").scorer, golden.leverage, None),
    "compactor": (
        policy("compactor", chunk_size=6).scorer,
        lambda o: golden.compactor(o, chunk_size=6),
        None,
    ),
    "duoattention": (
        policy("duoattention", streaming_sinks=3, streaming_recent=5, length=40).scorer,
        lambda o: golden.duoattention(o, sinks=3, recent=5, length=40),
        None,
    ),
}
TOLERANCES = {
    # The recorded column sums rounded the queries after RoPE, the definition before it.
    ("h2o", "bfloat16"): 2e-2,
    # Few keys have leverages that are all near 1; standardising magnifies what differs.
    ("compactor", "shorter_than_window"): 1e-3,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_scores_match_the_definition(method: str, layer: str) -> None:
    scorer, definition, params = METHODS[method]
    observation = make_observation(
        sum(map(ord, layer)), slots=31, window=max(scorer.window, 1), **LAYERS[layer]
    )
    scores = scores_of(scorer, observation, params)
    assert scores.dtype == np.float32
    tolerance = TOLERANCES.get((method, layer), 1e-4)
    for row in range(2):
        o = mirror(observation, row)
        assert_close(scores[row], definition(o), o.positions >= 0, tolerance)
