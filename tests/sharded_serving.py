"""Run by `test_sharded_serving` in a process of its own, which has eight CPU devices.

Prints as JSON what serving over a mesh gives, next to one device: prompt, question, decoding.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np

import kvjax
from benchmarks.hlo import traffic
from benchmarks.serving import trace_decode
from kvjax.models.sharding import make_mesh
from tests import tiny

MESH = {"data": 2, "tensor": 2}
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": {},
    "h2o": {},  # evicts while it decodes
    "retention-global": {"pages": 16},  # heads compete for one budget
    "snapkv+memory": {},
}
LENGTHS, BUDGET, STEPS = np.array([40, 27], np.int32), np.array([12, 8], np.int32), 6


def served(model: kvjax.Decoder, name: str, **options: Any) -> dict[str, Any]:
    """Greedy tokens after a prompt and a question, and what the cache holds then."""
    policy = {"policy": tiny.policy(name), "params": tiny.params(name)}
    tokens = tiny.tokens(rows=2, length=int(LENGTHS.max()))
    logits, cache = kvjax.prefill(
        model, tokens, LENGTHS, budget=BUDGET, room=16, **policy, **options
    )
    question = tiny.tokens(rows=2, length=5)
    logits, cache = kvjax.extend(model, cache, question, [5, 3], budget=BUDGET, **policy)
    out = kvjax.generate(model, cache, logits, max_new_tokens=STEPS, budget=BUDGET, **policy)
    return {
        "logits": np.asarray(logits).tolist(),
        "tokens": np.asarray(out.tokens).tolist(),
        "lengths": np.asarray(out.cache.lengths).tolist(),
    }


def decode_traffic() -> dict[str, Any]:
    """The collectives of one compiled decode step."""
    mesh = make_mesh(**MESH)
    model = kvjax.Decoder.abstract(tiny.CONFIG, mesh=mesh)
    sizes = {"rows": 4, "prompt": 64, "capacity": 32}
    traced = trace_decode(model, mesh, tiny.policy("snapkv"), **sizes)
    found = traffic(traced.lower().compile().as_text())
    return {"count": dict(found.count), "bytes": dict(found.bytes), "unknown": found.unknown_loops}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    model = tiny.model()
    placed = jax.device_put(model, kvjax.Decoder.shardings(model.config, make_mesh(**MESH)))
    with tiny.quick_compilation():
        found = {
            name: [served(model, name, **given), served(placed, name, **given)]
            for name, given in POLICIES.items()
        }
    json.dump({"served": found, "decode": decode_traffic()}, sys.stdout)
