"""The kvpress side of `policy_cost.py`: seconds per layer of each press; protocol as there."""

import json
import sys
import time

import kvpress
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings["config"])).eval()
    tokens = torch.tensor([settings["tokens"]])
    ratio = 1 - settings["fraction"]
    presses = {
        "streaming": lambda: kvpress.StreamingLLMPress(compression_ratio=ratio),
        "knorm": lambda: kvpress.KnormPress(compression_ratio=ratio),
        "tova": lambda: kvpress.TOVAPress(compression_ratio=ratio),
        "keydiff": lambda: kvpress.KeyDiffPress(compression_ratio=ratio),
        "snapkv": lambda: kvpress.SnapKVPress(compression_ratio=ratio, window_size=32),
        "ada-snapkv": lambda: kvpress.AdaKVPress(
            kvpress.SnapKVPress(compression_ratio=ratio, window_size=32)
        ),
        "chunkkv": lambda: kvpress.ChunkKVPress(
            kvpress.SnapKVPress(compression_ratio=ratio, window_size=32)
        ),
        "pyramidkv": lambda: kvpress.PyramidKVPress(compression_ratio=ratio, window_size=32),
        "expected-attention": lambda: kvpress.ExpectedAttentionPress(compression_ratio=ratio),
        "lagkv": lambda: kvpress.LagKVPress(compression_ratio=ratio),
        "criticalkv": lambda: kvpress.CriticalKVPress(
            kvpress.SnapKVPress(compression_ratio=ratio, window_size=32)
        ),
        "compactor": lambda: kvpress.CompactorPress(compression_ratio=ratio),
        "value-merging": lambda: kvpress.MergingPress(
            kvpress.SnapKVPress(compression_ratio=ratio, window_size=32)
        ),
    }
    with torch.inference_mode():
        print(json.dumps({"policies": sorted(presses)}), flush=True)
        for _ in sys.stdin:
            measured = {}
            for name, make in presses.items():
                measured[name] = seconds_per_layer(model, tokens, make())
            print(json.dumps(measured), flush=True)


def seconds_per_layer(model, tokens, press) -> float:
    """Everything the press adds to the prefill: the time inside its hook, over the layers."""
    spent = []
    hook = press.forward_hook

    def timed(*args, **kwargs):
        start = time.perf_counter()
        result = hook(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        return result

    press.forward_hook = timed
    with press(model):
        model(tokens, past_key_values=DynamicCache(), logits_to_keep=1)
    if not spent:
        raise SystemExit(f"{type(press).__name__}: its hook never ran")
    return sum(spent) / model.config.num_hidden_layers


if __name__ == "__main__":
    main()
