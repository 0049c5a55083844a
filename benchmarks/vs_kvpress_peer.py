"""The kvpress side of `vs_kvpress.py`; runs in an environment of its own (PyTorch, kvpress).

Protocol: settings as JSON in argv; "ready" facts as one JSON line; then, for every line on
standard input, one round of measurements and one JSON line with its seconds.
"""

import json
import sys
import time

import kvpress
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings["config"])).eval()
    model.save_pretrained(settings["checkpoint"], safe_serialization=True)
    tokens = torch.tensor([settings["tokens"]])
    facts = {
        "versions": {
            "kvpress": kvpress_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "attention": model.config._attn_implementation,
    }
    with torch.inference_mode():
        facts["logits"] = prefill(model, tokens, DynamicCache())[0, -1].tolist()
        print(json.dumps(facts), flush=True)
        for _ in sys.stdin:
            print(json.dumps(measure(model, tokens, settings)), flush=True)


def measure(model, tokens, settings) -> dict[str, float]:
    plain = run(model, tokens, settings, press=None)
    press = kvpress.SnapKVPress(
        compression_ratio=1 - settings["fraction"],
        window_size=settings["window"],
        kernel_size=settings["kernel"],
    )
    spent = timed(press)
    snapkv = run(model, tokens, settings, press)
    layers = model.config.num_hidden_layers
    return {
        "prefill": plain[0],
        "decode": plain[1],
        "snapkv_prefill": snapkv[0],
        "snapkv_decode": snapkv[1],
        "snapkv_per_layer": sum(spent) / layers,
        "snapkv_slots": snapkv[2],
    }


def run(model, tokens, settings, press) -> tuple[float, float, int]:
    """Seconds of prefill, seconds per decoded token, and slots after prefill."""
    cache = DynamicCache()
    start = time.perf_counter()
    if press is None:
        logits = prefill(model, tokens, cache)
    else:
        with press(model):
            logits = prefill(model, tokens, cache)
    prefilled = time.perf_counter()
    slots, position = cache.get_seq_length(), tokens.shape[1]
    for step in range(settings["new_tokens"]):
        token = logits[:, -1].argmax(-1, keepdim=True)
        logits = model(
            token, past_key_values=cache, position_ids=torch.tensor([[position + step]])
        ).logits
    decoded = time.perf_counter()
    return prefilled - start, (decoded - prefilled) / settings["new_tokens"], slots


def prefill(model, tokens, cache):
    return model(tokens, past_key_values=cache, logits_to_keep=1).logits


def timed(press) -> list[float]:
    """Makes the press note the seconds of every layer's scoring and pruning."""
    spent: list[float] = []
    compress = press.compress

    def measured(*args):
        start = time.perf_counter()
        result = compress(*args)
        spent.append(time.perf_counter() - start)
        return result

    press.compress = measured
    return spent


def kvpress_version() -> str:
    from importlib.metadata import version

    return version("kvpress")


if __name__ == "__main__":
    main()
