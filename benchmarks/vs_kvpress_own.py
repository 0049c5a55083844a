"""The kvjax side of `vs_kvpress.py`: the same protocol as `vs_kvpress_peer.py`, same weights."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import jaxlib
import numpy as np

import kvjax

BANDWIDTH_BYTES = 512 * 2**20


def main() -> None:
    settings = json.loads(sys.argv[1])
    model = kvjax.load(settings["checkpoint"], dtype="float32").model
    tokens = np.array([settings["tokens"]], np.int32)
    snapkv = kvjax.policy("snapkv", window=settings["window"], kernel=settings["kernel"])
    logits, _ = kvjax.prefill(model, tokens)
    facts = {
        "versions": {
            "kvjax": kvjax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
        "logits": np.asarray(logits[0]).tolist(),
        "weight_bytes": read_per_token(model),
    }
    print(json.dumps(facts), flush=True)
    array = np.ones(BANDWIDTH_BYTES // 4, np.float32)
    for _ in sys.stdin:
        print(json.dumps(measure(model, tokens, snapkv, settings, array)), flush=True)


def measure(
    model: kvjax.Decoder,
    tokens: np.ndarray,
    snapkv: kvjax.Policy,
    settings: dict[str, Any],
    array: np.ndarray,
) -> dict[str, float]:
    plain = run(model, tokens, kvjax.policy("full"), 1.0, settings)
    compressed = run(model, tokens, snapkv, settings["fraction"], settings)
    return {
        "prefill": plain[0],
        "decode": plain[1],
        "cache_bytes": plain[2],
        "snapkv_prefill": compressed[0],
        "snapkv_decode": compressed[1],
        "snapkv_cache_bytes": compressed[2],
        "snapkv_slots": compressed[3],
        "snapkv_per_layer": compression(model, tokens, snapkv, settings["fraction"]),
        "bandwidth": bandwidth(array),
    }


def run(
    model: kvjax.Decoder,
    tokens: np.ndarray,
    policy: kvjax.Policy,
    budget: float,
    settings: dict[str, Any],
) -> tuple[float, float, int, int]:
    """Seconds of prefill, seconds per decoded token, bytes and slots after prefill."""
    start = time.perf_counter()
    logits, cache = kvjax.prefill(
        model, tokens, policy=policy, budget=budget, room=settings["new_tokens"]
    )
    jax.block_until_ready((logits, cache))
    prefilled = time.perf_counter()
    filled = int(cache.lengths.sum())
    entry = 2 * model.config.head_dim * model.dtype.itemsize
    slots = int(cache.lengths.max())
    start_decode = time.perf_counter()
    answer = kvjax.generate(model, cache, logits, max_new_tokens=settings["new_tokens"])
    jax.block_until_ready(answer)
    decoded = time.perf_counter()
    per_token = (decoded - start_decode) / settings["new_tokens"]
    return prefilled - start, per_token, filled * entry, slots


def compression(
    model: kvjax.Decoder, tokens: np.ndarray, policy: kvjax.Policy, budget: float
) -> float:
    """Seconds per layer of scoring, selecting and compacting alone, the prefill being done."""
    _, full, observed = kvjax.observe(model, tokens, policies=(policy,))
    jax.block_until_ready((full, observed))
    start = time.perf_counter()
    cache = kvjax.compress(model, full, observed, policy=policy, budget=budget)
    jax.block_until_ready(cache)
    return (time.perf_counter() - start) / model.config.num_layers


def bandwidth(array: np.ndarray) -> float:
    """Bytes per second of reading a large array once, by the faster of two ways."""
    seconds = []
    for read in (np.sum, lambda x: np.dot(x, x)):
        start = time.perf_counter()
        read(array)
        seconds.append(time.perf_counter() - start)
    return array.nbytes / min(seconds)


def read_per_token(model: kvjax.Decoder) -> int:
    """Bytes of weights that one decoded token reads: all but the table of untied embeddings."""
    table = 0 if model.config.tie_embeddings else model.embedding[...].nbytes
    return model.nbytes - table


if __name__ == "__main__":
    main()
