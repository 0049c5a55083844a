"""The kvpress side of `scores_vs_kvpress.py`: greedy answers of every press as token ids."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {
    "streaming": kvpress.StreamingLLMPress,
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "snapkv(window=64)": kvpress.SnapKVPress,
    "expected-attention": kvpress.ExpectedAttentionPress,
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for number, sample in enumerate(job["samples"], 1):
            for policy, budget, kept in sample["kept"]:
                ids = answer(model, sample, policy, kept, job)
                answers.append((sample["id"], policy, budget, ids))
            print(f"kvpress {number} of {len(job['samples'])}", file=sys.stderr, flush=True)
    versions = {name: version(name) for name in ("torch", "transformers", "kvpress")}
    print(json.dumps({"versions": versions, "answers": answers}))


def answer(model, sample, policy, kept, job) -> list[int]:
    """Prefill under the press, then the question at its true positions, then greedy decoding."""
    context = torch.tensor([sample["context"]])
    length, cache = context.shape[1], DynamicCache()
    if policy == "full":
        model(context, past_key_values=cache, logits_to_keep=1)
    else:
        # int(length * (1 - ratio)) is what a press keeps; half an entry keeps it off the edge.
        press = PRESSES[policy](compression_ratio=1 - (kept + 0.5) / length)
        with press(model):
            model(context, past_key_values=cache, logits_to_keep=1)
        if cache.get_seq_length() != kept:
            raise SystemExit(f"{policy} kept {cache.get_seq_length()} entries, not {kept}")
    tokens, ids = torch.tensor([sample["question"]]), []
    position = length
    for _ in range(job["max_new_tokens"]):
        places = torch.arange(position, position + tokens.shape[1])[None]
        logits = model(tokens, past_key_values=cache, position_ids=places, logits_to_keep=1).logits
        position += tokens.shape[1]
        token = int(logits[0, -1].argmax())
        if token in job["end_tokens"]:
            break
        ids.append(token)
        tokens = torch.tensor([[token]])
    return ids


if __name__ == "__main__":
    main()
