from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.window_scores import window_attention
from tests.policies.observations import attention, make_observation, mirror


@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_match_numpy(num_heads: int, dtype: object) -> None:
    o = make_observation(
        1, num_heads=num_heads, cached=8, lengths=[16, 2], holes=0.3, window=5, dtype=dtype
    )
    weights = window_attention(o.queries, o.keys, o.query_positions, o.positions)
    assert weights.dtype == jnp.float32
    for row in range(2):
        m = mirror(o, row)
        expected = attention(m.queries, m.query_positions, m.keys, m.positions)
        np.testing.assert_allclose(weights[row], expected, rtol=0, atol=2e-6)


def test_absent_queries_and_queries_that_see_nothing_have_zero_rows() -> None:
    o = make_observation(2, window=4, lengths=[24, 2])
    late = jnp.where(o.positions >= 0, o.positions + 100, -1)
    seen = window_attention(o.queries, o.keys, o.query_positions, o.positions)
    unseen = window_attention(o.queries, o.keys, o.query_positions, late)
    np.testing.assert_array_equal(seen[1, :, :2], 0.0)
    np.testing.assert_allclose(jnp.sum(seen[1, :, 2:], axis=-1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(unseen, 0.0)


@pytest.mark.parametrize("window", [1, 5, 1000])
@pytest.mark.parametrize("traced", [False, True])
def test_a_sliding_window_hides_what_lies_behind_it(window: int, traced: bool) -> None:
    o = make_observation(3, window=4)
    given = jnp.int32(window) if traced else window
    weights = window_attention(o.queries, o.keys, o.query_positions, o.positions, window=given)
    distance = o.query_positions[:, None, :, None] - o.positions[:, :1, None, :]
    outside = jnp.broadcast_to((distance < 0) | (distance >= window), weights.shape)
    np.testing.assert_array_equal(np.asarray(weights)[np.asarray(outside)], 0.0)
    np.testing.assert_allclose(jnp.sum(weights, axis=-1), 1.0, rtol=1e-5)


def test_large_logits_and_gradients_stay_finite() -> None:
    o = make_observation(4, window=4, lengths=[24, 1], holes=0.5)

    def total(queries: jax.Array) -> jax.Array:
        weights = window_attention(queries, o.keys, o.query_positions, o.positions)
        return jnp.sum(weights * weights)

    assert np.isfinite(total(o.queries * 1e6))
    assert np.all(np.isfinite(jax.grad(total)(o.queries)))


def test_heads_that_do_not_divide_are_refused() -> None:
    o = make_observation(5, num_heads=4)
    with pytest.raises(ValueError, match="cannot share 2 KV heads evenly"):
        window_attention(o.queries[:, :3], o.keys, o.query_positions, o.positions)
