"""Compaction in place: the kernels, simulated, move the same rows as the reference, bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import lowering
from kernels_pallas.gather_compact import compact
from kernels_pallas.gather_compact import reference as definition

KERNELS = ["mosaic_tpu", "mosaic_gpu"]


@pytest.fixture(autouse=True)
def fresh_simulators():
    yield
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def quick_tpu(monkeypatch):
    """JAX's plain interpreter in place of the TPU's simulator, which takes a minute per head."""
    monkeypatch.setattr(lowering, "tpu_interpret", lambda: True)


def heads_of(slots: int, shares: list[float], seed: int):
    """Per head a random share of the slots in use, all in use but of the last head."""
    draw = np.random.default_rng(seed)
    held = np.full(len(shares), slots, np.int32)
    held[-1] = slots // 2
    keep = draw.random((len(shares), slots)) < np.array(shares)[:, None]
    keep &= np.arange(slots) < held[:, None]
    lengths = keep.sum(-1).astype(np.int32)
    indices = np.full((len(shares), slots), slots, np.int32)
    for head, row in enumerate(keep):
        indices[head, : lengths[head]] = np.flatnonzero(row)
    return jnp.asarray(indices), jnp.asarray(lengths), jnp.asarray(held)


def rows_of(held, slots: int, size: int, dtype, seed: int):
    """Random bits, NaN and infinity among them; 0 behind `held`."""
    shape = (held.shape[0], slots, size)
    values = np.random.default_rng(seed).standard_normal(shape)
    values[:, ::7, 0] = np.nan
    values[:, ::5, 1] = np.inf
    values[:, ::3, 2] = -0.0
    used = np.arange(slots)[None, :, None] < np.asarray(held)[:, None, None]
    return jnp.asarray(np.where(used, values, 0), dtype)


def assert_same_bits(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(
            np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)
        )


SHARES = [0.9, 0.2, 1.0, 0.0, 0.5]


@pytest.mark.usefixtures("quick_tpu")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("slots", "size", "dtype"),
    [(144, 128, jnp.bfloat16), (141, 64, jnp.bfloat16), (37, 80, jnp.float32)],
)
def test_kernels_move_what_the_reference_moves(kernel, slots, size, dtype):
    indices, lengths, held = heads_of(slots, SHARES, seed=0)
    arrays = (rows_of(held, slots, size, dtype, 1), rows_of(held, slots, size, dtype, 2))
    found = compact(arrays, indices, lengths, held=held, implementation=kernel)
    assert_same_bits(found, definition.compact(arrays, indices, lengths, held))


@pytest.mark.usefixtures("quick_tpu")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("pages", [False, True])
def test_fewer_indices_than_slots_leave_zeros_up_to_what_was_held(kernel, pages):
    page, per_head, heads, count = 16, 10, 3, 13
    slots = page * per_head
    _, lengths, held = heads_of(slots, [0.05, 0.0, 0.04], seed=10)
    draw = np.random.default_rng(11)
    indices = np.full((heads, count), 7, np.int32)  # behind `lengths` they are not read
    for head, length in enumerate(np.asarray(lengths)):
        chosen = draw.choice(int(held[head]), int(length), replace=False)
        indices[head, :length] = np.sort(chosen)
    shape, table = (heads,), None
    arrays = (rows_of(held, slots, 128, jnp.bfloat16, 12),)
    if pages:
        shape = (1, 1, heads)
        table = draw.permutation(heads * per_head).reshape(*shape, per_head)
        table = jnp.asarray(table, jnp.int32)
        arrays = (jnp.asarray(draw.standard_normal((1, 30, page, 128)), jnp.bfloat16),)
        held = jnp.full_like(held, slots)
    at = (jnp.asarray(indices).reshape(*shape, count), lengths.reshape(shape))
    options = {"held": held.reshape(shape), "table": table}
    found = compact(arrays, *at, **options, implementation=kernel)
    assert_same_bits(found, compact(arrays, *at, **options, implementation="reference"))


@pytest.mark.usefixtures("quick_tpu")
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_move_rows_between_scattered_pages(kernel):
    layers, batch, kv_heads, page, per_head = 1, 2, 2, 16, 3
    slots = page * per_head
    indices, lengths, held = heads_of(slots, [0.9, 0.3, 1.0, 0.6], seed=3)
    shape = (layers, batch, kv_heads)
    indices = indices.reshape(*shape, slots)
    lengths, held = lengths.reshape(shape), held.reshape(shape)
    draw = np.random.default_rng(4)
    table = np.stack([draw.permutation(8)[: kv_heads * per_head] for _ in range(batch)])
    table = table.reshape(batch, layers, kv_heads, per_head).swapaxes(0, 1).astype(np.int32)
    table = np.where(np.arange(per_head) * page < np.asarray(held)[..., None], table, -1)
    pool = jnp.asarray(draw.standard_normal((batch, 8, page, 128)), jnp.bfloat16)
    found = compact(
        (pool,), indices, lengths, held=lengths, table=jnp.asarray(table), implementation=kernel
    )[0]
    wanted = definition.compact((pool,), indices, lengths, held, jnp.asarray(table))[0]
    for head in np.ndindex(shape):
        for slot in range(int(lengths[head])):
            at = (head[1], table[head][slot // page], slot % page)
            np.testing.assert_array_equal(np.asarray(found)[at], np.asarray(wanted)[at])
    free = np.setdiff1d(np.arange(8), table[:, 0])
    np.testing.assert_array_equal(np.asarray(found)[0, free], np.asarray(pool)[0, free])


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_row_is_overwritten_before_it_is_read(kernel):
    slots = 40
    indices, lengths, held = heads_of(slots, [0.8, 0.3], seed=5)
    arrays = (rows_of(held, slots, 128, jnp.bfloat16, 6),)
    with lowering.interpreting(detect_races=True):
        found = compact(arrays, indices, lengths, held=held, implementation=kernel)
    assert_same_bits(found, definition.compact(arrays, indices, lengths, held))


def test_the_reference_moves_kept_rows_to_the_front_and_clears_the_rest():
    indices, lengths, held = heads_of(50, SHARES, seed=7)
    array = rows_of(held, 50, 4, jnp.float32, 8)
    found = np.asarray(compact((array,), indices[:, :45], lengths, implementation="reference")[0])
    for head, count in enumerate(np.minimum(np.asarray(lengths), 45)):
        chosen = np.asarray(indices)[head, :count]
        np.testing.assert_array_equal(found[head, :count], np.asarray(array)[head, chosen])
        np.testing.assert_array_equal(found[head, count:], 0)


def test_what_a_kernel_does_not_serve_is_named():
    indices, lengths, _ = heads_of(8, [0.5], seed=9)
    half = jnp.zeros((1, 8, 128), jnp.float16)
    with pytest.raises(NotImplementedError, match="dtype float16: allowed are"):
        compact((half,), indices, lengths, implementation="mosaic_tpu")
    short = jnp.zeros((1, 8, 3), jnp.float32)
    with pytest.raises(NotImplementedError, match="rows of 3 float32"):
        compact((short,), indices, lengths, implementation="mosaic_gpu")


def test_donated_arrays_are_aliased_on_every_platform(monkeypatch):
    monkeypatch.setattr(lowering, "gpu_interpret", lambda: False)
    spec = jax.ShapeDtypeStruct((2, 32, 128), jnp.float32)
    scalars = jax.ShapeDtypeStruct((2,), jnp.int32)

    def run(array, indices, lengths):
        return compact((array,), indices, lengths, implementation="mosaic_tpu")

    monkeypatch.setattr(lowering, "tpu_interpret", lambda: False)
    jaxpr = jax.make_jaxpr(run)(spec, jax.ShapeDtypeStruct((2, 32), jnp.int32), scalars)
    assert "input_output_aliases=((" in str(jaxpr)
