"""Hugging Face `config.json` to and from `ModelConfig`, refusing what is not computed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models.config import FAMILIES, ROPE_KINDS, ModelConfig, RopeConfig

# What transformers assumes when a config.json omits the key.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
    "qwen2": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
    },
    "qwen3": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}

# Keys that change the computation, with the values under which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "attention_sinks": (None, False, 0),
    "num_sink_tokens": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "query_pre_attn_scalar": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
}

ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
ROPE_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face config dict.

    Both spellings are read: `rope_theta` + `rope_scaling`, and the transformers 5 form
    `rope_parameters` and `layer_types`. Raises a one-line `ValueError` that names the first
    feature this decoder does not compute.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r}: allowed are {', '.join(FAMILIES)}")
    for key, allowed in NEUTRAL.items():
        if raw.get(key) not in allowed:
            raise ValueError(f"config feature {key}={raw[key]!r} is not supported: leave it out")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r}: allowed is silu")

    values = {**DEFAULTS[family], **raw}
    layers = _integer(values, "num_hidden_layers")
    heads = _integer(values, "num_attention_heads")
    hidden = _integer(values, "hidden_size")
    max_length = _integer(values, "max_position_embeddings")
    head_dim = values.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ValueError(f"hidden_size={hidden}: allowed are multiples of {heads} heads")
    rope = read_rope(values, max_length)
    if rope.kind == "yarn":
        max_length = max(max_length, round(rope.original_max_length * rope.factor))
    attention_bias = bool(values.get("attention_bias", False))
    if family == "mistral" and attention_bias:
        raise ValueError("config feature attention_bias=True is not supported for mistral")
    return ModelConfig(
        family=family,
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads
        if values.get("num_key_value_heads") is None
        else _integer(values, "num_key_value_heads"),
        head_dim=hidden // heads if head_dim is None else _integer(values, "head_dim"),
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_length=max_length,
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        windows=_read_windows(values, family, layers),
    )


def read_rope(values: Mapping[str, Any], max_length: int) -> RopeConfig:
    """The rotary settings of a Hugging Face config dict, either spelling."""
    raw = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise ValueError(f"rope_parameters per layer type {sorted(raw)}: allowed is one for all")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope type {kind!r}: allowed are {', '.join(ROPE_KINDS)}")
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"config feature partial_rotary_factor={raw['partial_rotary_factor']!r} is not "
            "supported: allowed is 1.0"
        )
    if unknown := sorted(set(raw) - ROPE_COMMON - ROPE_KEYS[kind]):
        raise ValueError(
            f"rope parameter {unknown[0]!r} is not known for rope type {kind}: allowed are "
            f"{sorted(ROPE_KEYS[kind] | ROPE_COMMON)}"
        )
    theta = raw.get("rope_theta") or values.get("rope_theta") or 10_000.0
    settings: dict[str, Any] = {"kind": kind, "theta": float(theta)}
    original = values.get("original_max_position_embeddings")
    original = original or raw.get("original_max_position_embeddings") or max_length
    if kind in ("llama3", "yarn"):
        settings["original_max_length"] = int(original)
    if kind != "default":
        factor = raw.get("factor")
        if factor is None and kind == "yarn":
            factor = max_length / int(original)
        if factor is None:
            raise ValueError(f"rope type {kind} needs a factor: give a number >= 1")
        settings["factor"] = float(factor)
    for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if raw.get(key) is not None:
            settings[key] = float(raw[key])
    if kind == "yarn":
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            settings[key] = None if raw.get(key) is None else float(raw[key])
        settings["truncate"] = bool(raw.get("truncate", True))
    return RopeConfig(**settings)


def write(config: ModelConfig) -> dict[str, Any]:
    """The Hugging Face config dict; raises when the config has no such form."""
    rope = config.rope
    result: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": _write_rope(rope),
    }
    if config.family in ("llama", "qwen3"):
        result["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        result["mlp_bias"] = config.mlp_bias
    sizes = {window for window in config.windows if window is not None}
    if config.family == "mistral":
        result["sliding_window"] = max(sizes, default=None)
    elif config.family != "llama" and sizes:
        result["use_sliding_window"] = True
        result["sliding_window"] = max(sizes)
        result["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ]
    if read(result) != config:
        raise ValueError(
            f"this {config.family} config has no Hugging Face form: its biases, norms or windows "
            f"are not those of the family; allowed families are {', '.join(FAMILIES)}"
        )
    return result


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _write_rope(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    result: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        result["original_max_position_embeddings"] = rope.original_max_length
    if rope.kind == "llama3":
        result["low_freq_factor"] = rope.low_freq_factor
        result["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, key) is not None:
                result[key] = getattr(rope, key)
        result["truncate"] = rope.truncate
    return result


def _read_windows(values: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = values.get("sliding_window")
    kinds = values.get("layer_types")
    if kinds is not None:
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"layer type {kind!r}: allowed are full_attention, sliding_attention"
                )
        if len(kinds) != layers:
            raise ValueError(f"layer_types has {len(kinds)} entries: allowed is {layers}")
    if family == "llama":
        if kinds is not None and "sliding_attention" in kinds:
            raise ValueError("layer type 'sliding_attention': llama allows full_attention only")
        return (None,) * layers
    if family == "mistral":
        expected = "full_attention" if window is None else "sliding_attention"
        if kinds is not None and set(kinds) != {expected}:
            raise ValueError(f"layer_types of mistral: allowed is {expected} in every layer")
        return (window,) * layers
    if not values.get("use_sliding_window", False):
        window = None
    if kinds is None:
        first = int(values["max_window_layers"])
        return tuple(window if index >= first else None for index in range(layers))
    if "sliding_attention" in kinds and window is None:
        raise ValueError("layer type 'sliding_attention' needs sliding_window: give an integer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _integer(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config key {key}={value!r}: an integer is needed")
    return value
