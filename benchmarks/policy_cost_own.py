"""The kvjax side of `policy_cost.py`: seconds per layer of scoring, selecting and compacting."""

from __future__ import annotations

import json
import sys
import time

import jax
import numpy as np

import kvjax


def main() -> None:
    settings = json.loads(sys.argv[1])
    shape = settings["config"]
    config = kvjax.ModelConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_layers=shape["num_hidden_layers"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        max_length=shape["max_position_embeddings"],
    )
    model = kvjax.Decoder.random(config, jax.random.key(0))
    tokens = np.array([settings["tokens"]], np.int32)
    policies = {
        name: kvjax.policy(name, prefill="whole", decode_interval=0)
        for name in settings["policies"]
    }
    # What a policy brings along is made once per model, so it is no part of a prompt's cost.
    params = {name: kvjax.policy_params(model, policy) for name, policy in policies.items()}
    seen = {
        name: kvjax.observe(model, tokens, policies=(policy,))[1:]
        for name, policy in policies.items()
    }
    print(json.dumps({"policies": sorted(policies)}), flush=True)
    for _ in sys.stdin:
        measured = {}
        for name, policy in policies.items():
            start = time.perf_counter()
            cache = kvjax.compress(
                model,
                *seen[name],
                policy=policy,
                budget=settings["fraction"],
                params=params[name],
            )
            jax.block_until_ready(cache)
            measured[name] = (time.perf_counter() - start) / config.num_layers
        print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
