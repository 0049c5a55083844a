"""Run by `test_sharded_eviction` in a process of its own, which has eight CPU devices.

Prints as JSON what an eviction over a mesh keeps, next to one on one device, and what it exchanges.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.hlo import traffic
from kvjax import eviction
from kvjax.models.sharding import make_mesh
from kvjax.policies.allocators import Ada, Cake, Global, Pyramid
from kvjax.policies.base import Allocator, Uniform
from tests import tiny

L, B, K = 3, 4, 8
ALLOCATORS: dict[str, Allocator] = {
    "uniform": Uniform(),
    "pyramid": Pyramid(recent=2),
    "ada": Ada(),
    "cake": Cake(),
    "global": Global(),
    "global with floor and ceiling": Global(floor=2, ceiling=2.0),
}


def entries(slots: int) -> tuple[eviction.Verdict, Any]:
    """Scores with ties, protected entries and empty slots."""
    draw = np.random.default_rng(slots)
    verdict = eviction.Verdict(
        scores=np.round(draw.normal(size=(L, B, K, slots)), 1).astype(np.float32),
        rank=(draw.random((L, B, K, slots)) < 0.05).astype(np.int32),
        preference=draw.random((L, B)).astype(np.float32),
    )
    return verdict, draw.random((L, B, K, slots)) < 0.9


def compare(allocator: Allocator, slots: int) -> dict[str, Any]:
    """Which stay over two by four devices."""
    policy = dataclasses.replace(tiny.policy("snapkv"), allocator=allocator)
    verdict, valid = entries(slots)
    budget, lengths = np.array([6, 3, 9, 5], np.int32), np.full(B, slots, np.int32)
    windows = jnp.full(L, 2**30, jnp.int32)

    def stay(verdict: Any, valid: Any, budget: Any, lengths: Any) -> Any:
        return eviction.stay(policy, verdict, valid, budget, lengths, windows, slots)

    mesh = make_mesh(data=2, tensor=4)
    lies = {1: ("data",), 2: (None, "data"), 4: (None, "data", "tensor")}
    arguments = (verdict, valid, budget, lengths)
    placed = jax.tree.map(
        lambda a: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*lies[a.ndim]))), arguments
    )
    program = jax.jit(stay).lower(*placed).compile()
    exchanged = traffic(program.as_text())
    same = np.array_equal(program(*placed), jax.jit(stay)(*arguments))
    return {"same": same, "bytes": exchanged.total_bytes, "count": dict(exchanged.count)}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    found = {
        name: {slots: compare(allocator, slots) for slots in (32, 256)}
        for name, allocator in ALLOCATORS.items()
    }
    json.dump(found, sys.stdout)
