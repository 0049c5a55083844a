"""Record what PyTorch transformers computes for small random models of every family.

Runs in an environment of its own; nothing of kvjax is imported:

    python3.11 -m venv parity-venv
    parity-venv/bin/pip install torch==2.13.0 transformers==5.2.0 safetensors
    parity-venv/bin/python tests/parity/make_fixtures.py

Each file in `fixtures/` holds the weights under their checkpoint names (float32), `inputs/tokens`
[B, T], `outputs/full` [B, T, V] (one forward pass) and `outputs/cached` [B, T, V] (a prefill of
`PREFIX` tokens, then token by token with the transformers cache). Its metadata holds `config`,
the dict the model was made from, and `saved`, the dict transformers writes for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
TOKENS, PREFIX, BATCH = 40, 24, 2
LIMIT = 300_000

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# Half of them in the old spelling of rotary settings, half in that of transformers 5.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10_000.0},
    "llama_biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama3_rope": {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "smollm2": {
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 48,
        "tie_word_embeddings": True,
        "rope_theta": 100_000.0,
        "rope_interleaved": False,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 9, "rope_theta": 10_000.0},
    "qwen2": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
    },
    "qwen3": {
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}


def full_config(name: str) -> dict[str, Any]:
    """The config.json dict of a fixture."""
    config = {**COMMON, **CONFIGS[name]}
    if config["model_type"] == "qwen2":  # the head size of this family follows from the width
        del config["head_dim"]
    return config


def make_model(name: str) -> Any:
    """The PyTorch model of a fixture, its weights drawn from a seed that follows its place."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = full_config(name)
    config = AutoConfig.for_model(**values)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(list(CONFIGS).index(name))
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * noise + (1.0 if "norm" in key else 0.0))
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def run(model: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits of one forward pass, and of a prefill followed by cached steps."""
    import torch

    with torch.no_grad():
        full = model(tokens, use_cache=False).logits
        step = model(tokens[:, :PREFIX], use_cache=True)
        parts = [step.logits]
        for index in range(PREFIX, tokens.shape[1]):
            step = model(
                tokens[:, index : index + 1], past_key_values=step.past_key_values, use_cache=True
            )
            parts.append(step.logits)
    return full, torch.cat(parts, dim=1)


def make_tokens(name: str) -> Any:
    """The random prompt of a fixture."""
    import torch

    generator = torch.Generator().manual_seed(1000 + list(CONFIGS).index(name))
    size = (BATCH, TOKENS)
    return torch.randint(0, COMMON["vocab_size"], size, generator=generator)


def main() -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    FIXTURES.mkdir(exist_ok=True)
    for name in CONFIGS:
        model, tokens = make_model(name), make_tokens(name)
        full, cached = run(model, tokens)
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        tensors |= {"inputs/tokens": tokens.to(torch.int32)}
        tensors |= {"outputs/full": full, "outputs/cached": cached}
        metadata = {
            "config": json.dumps(full_config(name)),
            "saved": model.config.to_json_string(use_diff=True),
            "prefix": str(PREFIX),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        path = FIXTURES / f"{name}.safetensors"
        save_file(tensors, path, metadata)
        size = path.stat().st_size
        gap = float((full - cached).abs().max())
        print(f"{name}: {size} bytes, |logits| {float(full.abs().mean()):.2f}, cached {gap:.1e}")
        if size > LIMIT:
            sys.exit(f"{path} has {size} bytes, more than {LIMIT}")


if __name__ == "__main__":
    main()
