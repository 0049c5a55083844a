"""Answers of a batch on 1 and on 8 simulated devices; run as a program by test_spread.py."""

from __future__ import annotations

import json
import sys

import jax


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)

    import numpy as np

    import kvjax
    from eval import config, engine
    from tests.eval.fakes import WordTokenizer
    from tests.eval.test_engine import CONFIG

    loaded = (kvjax.Decoder.random(CONFIG, jax.random.key(1)), WordTokenizer())
    names = ["knorm", "snapkv", "ada-snapkv", "restkv"]  # the last brings arrays along
    policies = engine.build_policies([config.PolicyConfig(name=name) for name in names])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 900, size).tolist() for size in (125, 110, 97, 128, 80, 101, 99, 77)]
    questions = [rng.integers(5, 900, 9).tolist() for _ in prompts]
    found = {}
    for count in (1, 8):
        runner = engine.KvjaxEngine(loaded, policies, jax.devices()[:count])
        prefilled = runner.prefill(prompts)
        said, kept = [], []
        for name in names:
            layout = runner.layout(name, 40, prefilled.bucket, runner.room(9, 8))
            budgets = [runner.resolve(0.25, len(prompt)) for prompt in prompts]
            compressed = runner.compress(prefilled, name, budgets, layout)
            kept.append([row.kept.tolist() for row in compressed.rows])
            answers = runner.answer(prefilled, [compressed], questions, 8)
            said.append(answers.tokens)
        devices = len(prefilled.cache.keys.sharding.device_set)
        share = prefilled.cache.keys.addressable_shards[0].data.shape
        found[count] = {"said": said, "kept": kept, "devices": devices, "share": share}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
