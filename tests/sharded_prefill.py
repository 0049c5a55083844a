"""Run by `test_sequence_parallel` in a process of its own, which has eight CPU devices.

Prints as JSON what prefill over a mesh and prefill on one device have in common.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import kvjax
from benchmarks.hlo import traffic
from kernels_pallas.attention import library, reference
from kernels_pallas.dispatch import VARIABLE
from kvjax import decoding
from kvjax.models.sharding import make_mesh
from tests import tiny

LENGTHS = np.array([45, 29], np.int32)  # no multiple of any number of devices
BUDGET = np.array([12, 8], np.int32)
MESHES: dict[str, dict[str, int]] = {
    "sequence": {"sequence": 4},
    "tensor": {"sequence": 2, "tensor": 2},
    "data": {"sequence": 2, "data": 2},
    "all": {"sequence": 2, "tensor": 2, "data": 2},
}
# The proportions of Llama 3.1 8B: keys and values half of the residual, the MLP 3.5 times it.
LONG = kvjax.ModelConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=448,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_length=8192,
)
PROMPT, KEPT = 16384, 64


def prefill(model: kvjax.Decoder, name: str, **options: Any) -> Any:
    """Logits and cache of the ragged batch."""
    tokens = tiny.tokens(rows=2, length=int(LENGTHS.max()))
    options |= {"policy": tiny.policy(name), "params": tiny.params(name)}
    return kvjax.prefill(model, tokens, LENGTHS, budget=BUDGET, **options)


def on(mesh: str, model: kvjax.Decoder) -> kvjax.Decoder:
    """The model with its weights on such a mesh."""
    return jax.device_put(model, kvjax.Decoder.shardings(model.config, make_mesh(**MESHES[mesh])))


def difference(one: Any, two: Any) -> dict[str, Any]:
    """Whether the same positions are kept, and the largest gaps of entries and of policy state."""
    (logits, cache), (other, again) = one, two

    def gap(first: Any, second: Any) -> float:
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
        return max((float(np.max(np.abs(np.float64(a) - b))) for a, b in pairs), default=0.0)

    return {
        "same positions": np.array_equal(cache.positions, again.positions),
        "gap": gap((logits, cache.keys, cache.values), (other, again.keys, again.values)),
        "state": gap(cache.policy_state, again.policy_state),
    }


def parts(array: jax.Array) -> list[int]:
    """Into how many parts each axis is split."""
    held = array.sharding.shard_shape(array.shape)
    return [whole // part for whole, part in zip(array.shape, held, strict=True)]


def by_definition(queries: Any, keys: Any, values: Any, *, causal: bool = True) -> Any:
    """What a maintained kernel computes."""
    length = queries.shape[2]
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (queries.shape[0], length))
    slots = jnp.broadcast_to(place[:, None], keys.shape[:3])
    return reference.attention(queries, keys, values, place if causal else place + length, slots)


def comparisons() -> dict[str, Any]:
    """Prefill over meshes next to prefill on one device."""
    windowed, plain = tiny.model(), tiny.model(num_layers=2)
    found = {}

    def compare(name: str, model: kvjax.Decoder, *meshes: str, **options: Any) -> None:
        alone = prefill(model, name, **options)
        for mesh in meshes:
            result = prefill(on(mesh, model), name, **options)
            found[f"{name} {mesh}"] = difference(alone, result) | {"keys": parts(result[1].keys)}

    compare("h2o", windowed, "tensor", "data")
    compare("retention-global", windowed, "all", pages=16)
    compare("keydiff-block", windowed, "tensor")
    compare("snapkv", plain, "sequence")
    portable = prefill(plain, "snapkv")
    with (
        mock.patch.object(library, "splash", by_definition),
        mock.patch.dict(os.environ, {VARIABLE: "causal_attention=splash"}),
    ):
        found["kernels"] = difference(portable, prefill(on("data", plain), "snapkv"))
    return found


def compiled(**sizes: int) -> dict[str, Any]:
    """Bytes of one device, and what devices exchange, for a long prompt."""
    mesh = make_mesh(**sizes)
    policy = tiny.policy("snapkv")
    whole = jax.sharding.NamedSharding(mesh, PartitionSpec())

    def run(model: Any, tokens: Any, lengths: Any, budget: Any) -> Any:
        return decoding.prefill(model, tokens, lengths, budget, policy=policy, capacity=KEPT)

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole) for shape in ((1, PROMPT), (1,))
    ]
    model = kvjax.Decoder.abstract(LONG, mesh=mesh)
    program = jax.jit(run).trace(model, *shapes, shapes[1]).lower().compile()
    exchanged = traffic(program.as_text())
    return {
        "temporary": program.memory_analysis().temp_size_in_bytes,
        "count": dict(exchanged.count),
        "bytes": dict(exchanged.bytes),
    }


def main() -> None:
    programs = {"one": compiled(), "eight": compiled(sequence=8)}
    with tiny.quick_compilation():
        json.dump({"programs": programs, "compared": comparisons()}, sys.stdout)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
