"""The pooled maximum's kernels in their simulators, against the reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lowering
from kernels_pallas.pooled_max import (
    pallas_mosaic_gpu,
    pallas_mosaic_tpu,
    pooled_max,
    reference,
)
from kernels_pallas.pooled_max.pairs import Rule, Tensors, chosen_scores
from kernels_pallas.pooled_max.parts import query_ranges
from kernels_pallas.retention_attention.segments import Tokens, tokens, visible

SMALL = pallas_mosaic_tpu.Blocks(keys=128, queries=128)
KERNELS = {
    "tpu": partial(pallas_mosaic_tpu.pooled_max, blocks=SMALL),
    "gpu": partial(pallas_mosaic_gpu.pooled_max, splits=2),
}
TEACHER = Rule(0.25, "identity", "max")
INDEXER = Rule(1.0, "relu", "sum")
# Documents that end inside blocks, a single token, and padding.
PACKED = [0] * 70 + [1] + [2] * 100 + [-1] * 5


@pytest.fixture(autouse=True)
def clean_simulators():
    yield
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def a_case(heads, kv_heads, size, dtype, *, asking, held, weighted=True, offset=True, whole=False):
    """Random tensors for these tokens; `whole` draws small integers, whose products tie exactly."""
    draw = np.random.default_rng(heads * size)
    batch, length = asking.positions.shape
    slots = held.positions.shape[1]

    def numbers(*shape):
        if whole:
            return jnp.asarray(draw.integers(-1, 2, size=shape), jnp.float32)
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    # What is not there may hold anything.
    of_query = jnp.where(asking.positions < 0, jnp.nan, jnp.float32(0))[:, None]
    of_key = jnp.where(held.positions < 0, jnp.nan, jnp.float32(0))[:, None, :, None]
    tensors = Tensors(
        (numbers(batch, heads, length, size) + of_query[..., None]).astype(dtype),
        (numbers(batch, kv_heads, slots, size) + of_key).astype(dtype),
        numbers(batch, heads, length) + of_query if weighted else None,
        numbers(batch, heads, length) + of_query if offset else None,
    )
    return tensors, asking, held


def packed(*, empty_rows=0, last=None, near=0):
    """Tokens that ask, all or the last ones, and tokens that are held; then rows without any."""
    held = tokens(jnp.asarray([PACKED] + [[-1] * len(PACKED)] * empty_rows, jnp.int32))
    far = jnp.where(held.positions >= near, held.positions - near, -1)
    asking = Tokens(jnp.where(held.positions < 0, -1, far), held.segments)
    return {"asking": Tokens(*(a[:, -(last or 0) :] for a in asking)), "held": held}


def check(platform, rule, case, exact=False):
    tensors, asking, held = case
    wanted, query = reference.pooled_max(rule, *case)
    largest, found = jax.jit(partial(KERNELS[platform], rule))(*case)
    assert largest.dtype == jnp.float32 and found.dtype == jnp.int32
    np.testing.assert_allclose(largest, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(found) < 0, np.asarray(query) < 0)
    if exact:
        np.testing.assert_array_equal(found, query)
    # Sums in another order may prefer another query, if it is as good and sees the key.
    rows = np.arange(found.shape[0])[:, None]
    seen = np.asarray(visible(asking, held))[rows, np.asarray(found), np.arange(found.shape[1])]
    there = np.isfinite(wanted)
    assert seen[there].all()
    scores = np.asarray(chosen_scores(rule, tensors, found))
    np.testing.assert_allclose(scores[there], wanted[there], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
    ("rule", "heads", "kv_heads", "size", "dtype", "of"),
    [
        (TEACHER, 8, 2, 128, jnp.bfloat16, {"near": 3}),
        (INDEXER, 3, 1, 16, jnp.float32, {"empty_rows": 1, "last": 77}),
        (Rule(-0.5, "identity", "sum"), 6, 2, 80, jnp.bfloat16, {"near": 9}),
        (Rule(0.5, "relu", "max"), 8, 1, 64, jnp.float32, {"last": 1}),
    ],
    ids=["teacher", "indexer", "sum-over-kv-heads", "one-query"],
)
def test_kernels_agree_with_the_reference_and_have_no_data_races(
    platform, rule, heads, kv_heads, size, dtype, of
):
    bare = rule.activation == "identity" and rule.reduce == "sum"
    case = a_case(
        heads, kv_heads, size, dtype, weighted=rule is not TEACHER, offset=not bare, **packed(**of)
    )
    with lowering.interpreting(detect_races=size < 128):
        check(platform, rule, case)


@pytest.mark.parametrize("platform", KERNELS)
def test_of_equal_scores_the_first_query_wins(platform):
    """Across heads, KV heads, blocks of queries, and parts of them."""
    case = a_case(4, 4, 8, jnp.float32, weighted=False, offset=False, whole=True, **packed())
    check(platform, TEACHER, case, exact=True)


@pytest.mark.parametrize("platform", KERNELS)
def test_gradients_are_those_of_the_reference(platform):
    tensors, asking, held = a_case(2, 2, 16, jnp.float32, **packed(last=60))

    def loss(tensors, implementation):
        largest, _ = pooled_max(
            *tensors[:2],
            asking.positions,
            held.positions,
            weights=tensors.weights,
            offsets=tensors.offsets,
            query_segments=asking.segments,
            key_segments=held.segments,
            activation="relu",
            reduce="sum",
            near=2,
            implementation=implementation,
        )
        ramp = jnp.linspace(-1.0, 1.0, largest.shape[1], dtype=jnp.float32)[None]
        return jnp.sum(jnp.where(largest > -jnp.inf, largest * ramp, 0.0))

    found = jax.jit(jax.grad(loss), static_argnums=1)(tensors, f"mosaic_{platform}")
    wanted = jax.grad(loss)(tensors, "reference")
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("near", [0, 30])
def test_ranges_hold_every_pair_that_is_seen_and_skip_the_rest(near):
    tokens_of = packed(empty_rows=1, near=near)
    asking, held = tokens_of["asking"].padded(16), tokens_of["held"].padded(8)
    first, last = (np.asarray(a) for a in query_ranges(asking, held, 16, 8))
    seen = np.asarray(visible(asking, held))
    seen = seen.reshape(2, -1, 16, seen.shape[2] // 8, 8).any(axis=(2, 4))
    for row, block in np.ndindex(*first.shape):
        needed = np.flatnonzero(seen[row, :, block])
        if needed.size:
            assert first[row, block] <= needed[0] and needed[-1] < last[row, block]
    assert (last - first).sum() < 0.5 * seen.size
    assert ((last - first)[1] == 0).all()


@pytest.mark.parametrize("platform", KERNELS)
def test_other_numbers_are_declined_with_what_is_served(platform):
    case = a_case(1, 1, 8, jnp.float16, **packed())
    with pytest.raises(NotImplementedError, match="float16: served are float32 and bfloat16"):
        KERNELS[platform](TEACHER, *case)


@pytest.mark.parametrize("platform", KERNELS)
def test_heads_that_fast_memory_does_not_hold_are_declined(platform):
    case = a_case(1, 1, 4096, jnp.float32, **packed())
    with pytest.raises(NotImplementedError, match=r"bytes.*(are served|allowed are)"):
        KERNELS[platform](TEACHER, *case)
