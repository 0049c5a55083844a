"""Operations of a traced program are those of its products, as often as they run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from benchmarks.flops import flops


def test_products_in_loops_branches_and_gradients_count_as_often_as_they_run():
    def layers(x, weights, flag):
        x, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, weights)
        return jax.lax.cond(flag, lambda x: x @ weights[0], lambda x: x, x).sum()

    arguments = (jnp.ones((4, 8)), jnp.ones((3, 8, 8)), True)
    one = 2 * 4 * 8 * 8
    assert flops(jax.jit(layers).trace(*arguments)) == 4 * one
    # Each product has two in the backward pass, but for the first one's input.
    found = flops(jax.jit(jax.grad(layers, argnums=(0, 1))).trace(*arguments))
    assert found == 3 * 4 * one


def test_batched_products_and_calls_count():
    @jax.jit
    def inner(a, b):
        return jnp.einsum("bij,bjk->bik", a, b)

    traced = jax.jit(lambda a, b: inner(a, b) * 2).trace(jnp.ones((5, 2, 3)), jnp.ones((5, 3, 7)))
    assert flops(traced) == 2 * 5 * 2 * 3 * 7


def test_what_every_device_does_on_its_part_counts_for_all_of_them():
    mesh = AbstractMesh((4,), ("data",), (AxisType.Auto,))
    rows = PartitionSpec("data")

    def product(x, weight):
        return jax.shard_map(
            lambda x, weight: x @ weight,
            mesh=mesh,
            in_specs=(rows, PartitionSpec()),
            out_specs=rows,
        )(x, weight)

    traced = jax.jit(product).trace(jnp.zeros((8, 3)), jnp.zeros((3, 5)))
    assert flops(traced) == 2 * 8 * 3 * 5
