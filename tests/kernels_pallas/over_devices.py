"""Run by `test_partition` in a process of its own, which has eight CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.hlo import Traffic, traffic
from kernels_pallas.partition import partitioned
from kernels_pallas.select import competing_threshold, keep_mask, kept_indices, order_key

L, B, K, S = 3, 4, 4, 40
ROWS_AND_HEADS = PartitionSpec("data", "tensor")
ALL_LAYERS = PartitionSpec(None, "data", "tensor")


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)


def compiled(function: Callable[..., Any], arrays: Any, specs: Any) -> tuple[Any, Traffic]:
    """The result over devices, and what devices exchange for it."""
    placed = [
        jax.device_put(array, NamedSharding(mesh(), spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]
    program = jax.jit(function).lower(*placed).compile()
    return program(*placed), traffic(program.as_text())


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows_and_heads_are_split() -> None:
    seen = []

    @partitioned("B H Q D, B K S D, B K, , -> B H Q S, B N")
    def scores(queries, keys, shift, scale, *, offset, negate):
        seen.append((queries.shape, keys.shape))
        shape = (keys.shape[0], keys.shape[1], -1, *queries.shape[2:])
        found = jnp.einsum("bkgqd,bksd->bkgqs", queries.reshape(shape), keys) * scale + offset
        found = found if shift is None else found + shift[:, :, None, None, None]
        found = -found if negate else found
        return found.reshape(*queries.shape[:3], -1), jnp.sum(keys, axis=(2, 3))

    def program(queries, keys, offset):
        return scores(queries, keys, None, 2.0, offset=offset, negate=True)

    arrays = (normal(0, B, 2 * K, 3, 5), normal(1, B, K, 7, 5), np.float32(1.5))
    specs = (ROWS_AND_HEADS, ROWS_AND_HEADS, PartitionSpec())
    (found, sums), exchanged = compiled(program, arrays, specs)
    assert seen[-1] == ((2, 2, 3, 5), (2, 1, 7, 5)), seen
    assert not exchanged.count, exchanged
    assert found.sharding.spec == sums.sharding.spec == ROWS_AND_HEADS
    spread = np.repeat(arrays[1], 2, axis=1)
    wanted = -(np.einsum("bhqd,bhsd->bhqs", arrays[0], spread) * 2 + 1.5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def heads_that_no_result_has_are_whole() -> None:
    seen = []

    @partitioned("B H Q D, B K S D -> B S")
    def largest(queries, keys):
        seen.append((queries.shape, keys.shape))
        return jnp.max(jnp.sum(keys, axis=-1), axis=1) + jnp.sum(queries, axis=(1, 2, 3))[:, None]

    arrays = (normal(0, B, 2 * K, 3, 5), normal(1, B, K, 7, 5))
    found, exchanged = compiled(largest, arrays, (ROWS_AND_HEADS, ROWS_AND_HEADS))
    assert seen[-1] == ((2, 2 * K, 3, 5), (2, K, 7, 5)), seen
    assert set(exchanged.count) == {"all-gather"}
    wanted = arrays[1].sum(-1).max(1) + arrays[0].sum((1, 2, 3))[:, None]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def heads_that_devices_do_not_divide_are_whole() -> None:
    @partitioned("B K S -> B K S")
    def double(keys):
        return keys * 2

    array = normal(0, B, 3, 7)
    found, _ = compiled(double, (array,), (PartitionSpec("data"),))
    np.testing.assert_array_equal(found, array * 2)


def a_part_is_not_split_again() -> None:
    @partitioned("B K S -> B K S")
    def double(keys):
        return keys * 2

    def on_part(keys):
        return double(keys)

    def program(keys):
        return jax.shard_map(
            on_part, mesh=mesh(), in_specs=ROWS_AND_HEADS, out_specs=ROWS_AND_HEADS
        )(keys)

    array = normal(0, B, K, 7)
    found, exchanged = compiled(program, (array,), (ROWS_AND_HEADS,))
    assert not exchanged.count
    np.testing.assert_array_equal(found, array * 2)


def selection_stays_on_its_device() -> None:
    scores = np.round(normal(2, L, B, K, S), 1)  # with ties
    rank = (np.arange(S) % 9 == 0).astype(np.int32) + np.zeros((L, B, K, 1), np.int32)
    valid = normal(3, L, B, K, S) > -1.0
    budgets = np.random.default_rng(4).integers(1, S, (L, B, K)).astype(np.int32)
    arrays = (scores, rank, valid, budgets)
    for implementation in ("threshold", "digits"):

        def select(*arrays, implementation=implementation):
            keep = keep_mask(*arrays, implementation=implementation)
            return keep, *kept_indices(keep, S)

        found, exchanged = compiled(select, arrays, [ALL_LAYERS] * 4)
        assert not exchanged.count, (implementation, exchanged)
        keep = keep_mask(*arrays, implementation="reference")
        for one, other in zip(found, (keep, *kept_indices(keep, S)), strict=True):
            np.testing.assert_array_equal(one, other)


def competition_exchanges_counts_only() -> None:
    scores, rank = np.round(normal(5, B, L, K, S), 1), np.zeros((B, L, K, S), np.int32)
    high = np.full((B, L, K), S - 3, np.int32)
    total = np.array([40, 100, 7, 300], np.int32)
    spec = PartitionSpec("data", None, "tensor")
    for implementation, passes in (("threshold", 32), ("digits", 11 * 7)):

        def compete(scores, rank, high, total, implementation=implementation):
            keys = order_key(scores, rank, scores > -1.5)
            low = jnp.ones_like(high)
            return competing_threshold(keys, total, low, high, implementation=implementation)

        arrays = (scores, rank, high, total)
        specs = (spec, spec, spec, PartitionSpec("data"))
        found, exchanged = compiled(compete, arrays, specs)
        assert set(exchanged.count) == {"all-reduce"}, exchanged
        assert exchanged.total_bytes <= passes * 4 * B // 2, exchanged  # a count per row and pass
        wanted = compete(*arrays, implementation="threshold")
        np.testing.assert_array_equal(found, wanted)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    rows_and_heads_are_split()
    heads_that_no_result_has_are_whole()
    heads_that_devices_do_not_divide_are_whole()
    a_part_is_not_split_again()
    selection_stays_on_its_device()
    competition_exchanges_counts_only()
