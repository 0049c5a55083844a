"""Sinks beside a sliding window, in every implementation, against NumPy's mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.ragged_decode import decode_attention, decode_mass, paged_attention, paged_mass

WINDOW, SINKS, PAGE = 9, 3, 16
GROUP, SIZE, SLOTS = 2, 64, 64
# Rows far from their sinks, among them, and with a padding query.
ASKED = np.array([[50, 52], [1, 4], [70, -1]], np.int32)


@pytest.fixture(autouse=True)
def fresh_simulators():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import tpu as pltpu

    yield
    pltpu.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def cache():
    """Queries, keys, values, positions in no order, lengths and mass elsewhere; one KV head."""
    rng = np.random.default_rng(0)
    batch = len(ASKED)
    queries = rng.normal(size=(batch, GROUP, ASKED.shape[1], SIZE)).astype(np.float32)
    keys, values = rng.normal(size=(2, batch, 1, SLOTS, SIZE)).astype(np.float32)
    positions = np.stack([rng.permutation(SLOTS) for _ in range(batch)])[:, None]
    lengths = np.array([[SLOTS], [50], [41]], np.int32)
    others = rng.normal(size=queries.shape[:3]).astype(np.float32)
    return queries, keys, values, positions.astype(np.int32), lengths, others


def defined(queries, keys, values, positions, lengths, others):
    """Outputs and mass of a softmax over what a query sees."""
    out = np.zeros_like(queries)
    mass = np.zeros((*queries.shape[:2], SLOTS))
    for row, head, at in np.ndindex(queries.shape[:3]):
        asked, held = ASKED[row, at], positions[row, 0]
        near = (held > asked - WINDOW) | (held < SINKS)
        seen = (np.arange(SLOTS) < lengths[row, 0]) & (held <= asked) & near
        if not seen.any():
            continue
        logits = np.where(seen, keys[row, 0] @ queries[row, head, at] * SIZE**-0.5, -np.inf)
        terms = np.exp(logits)
        out[row, head, at] = terms @ values[row, 0] / terms.sum()
        mass[row, head] += terms / (terms.sum() + np.exp(others[row, head, at]))
    return out, mass


def in_pages(array):
    return array.reshape(array.shape[0], SLOTS // PAGE, PAGE, *array.shape[3:])


@pytest.mark.parametrize("implementation", ["reference", "mosaic_tpu", "mosaic_gpu", None])
@pytest.mark.parametrize("paged", [False, True])
def test_sinks_stay_in_sight_of_every_query(paged, implementation):
    queries, keys, values, positions, lengths, others = cache()
    out, mass = defined(queries, keys, values, positions, lengths, others)
    if paged:
        table = np.tile(np.arange(SLOTS // PAGE, dtype=np.int32), (len(ASKED), 1, 1))
        pools = (in_pages(array) for array in (keys, values, positions))
        arguments = (queries, *pools, table, lengths, ASKED)
        attend, attend_mass = paged_attention, paged_mass
    else:
        arguments = (queries, keys, values, ASKED, positions, lengths)
        attend, attend_mass = decode_attention, decode_mass
    arguments = tuple(map(jnp.asarray, arguments))

    def both(*arguments):
        options = {"sinks": SINKS, "implementation": implementation}
        alone = attend(*arguments, WINDOW, **options)[0]
        return alone, attend_mass(*arguments, jnp.asarray(others), WINDOW, **options)

    alone, (beside, _, found) = jax.jit(both)(*arguments)
    np.testing.assert_allclose(alone, out, atol=3e-5)
    np.testing.assert_allclose(beside, out, atol=3e-5)
    np.testing.assert_allclose(found, mass, atol=3e-5)


def test_a_negative_number_of_sinks_is_refused():
    queries, keys, values, positions, lengths, _ = map(jnp.asarray, cache())
    with pytest.raises(ValueError, match="sinks -1: allowed are integers >= 0"):
        decode_attention(queries, keys, values, jnp.asarray(ASKED), positions, lengths, sinks=-1)
