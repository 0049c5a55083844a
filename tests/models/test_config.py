"""Configs of every family are read, and what is not computed is refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvjax.models.config import ModelConfig, RopeConfig
from tests.models.small import CONFIGS

HF = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def read(**changes):
    return ModelConfig.from_hf({**HF, **changes})


def test_head_size_defaults_to_width_over_heads():
    assert read().head_dim == 8
    assert read(head_dim=16).head_dim == 16
    assert read(head_dim=None).head_dim == 8
    assert read(model_type="qwen3").head_dim == 128


def test_mistral_windows_cover_every_layer_and_null_means_none():
    assert read(model_type="mistral", sliding_window=9).windows == (9,) * 4
    assert read(model_type="mistral", sliding_window=None).windows == (None,) * 4
    assert read(model_type="mistral").windows == (4096,) * 4


def test_qwen_windows_start_at_max_window_layers_and_only_when_used():
    settings = {"model_type": "qwen2", "sliding_window": 7, "max_window_layers": 3}
    assert read(**settings).windows == (None,) * 4
    assert read(**settings, use_sliding_window=True).windows == (None, None, None, 7)
    kinds = ["sliding_attention", "full_attention"] * 2
    used = read(**settings, use_sliding_window=True, layer_types=kinds)
    assert used.windows == (7, None, 7, None)


def test_biases_and_norms_follow_the_family():
    assert read(model_type="qwen2").qkv_bias
    assert not read(model_type="qwen2").output_bias
    assert read(model_type="qwen3").qk_norm
    llama = read(attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.output_bias and llama.mlp_bias


def test_old_and_new_rope_spellings_agree():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    old = read(rope_theta=5e5, rope_scaling=scaling)
    new = read(rope_parameters={**scaling, "rope_theta": 5e5})
    assert old == new
    assert old.rope == RopeConfig(kind="yarn", theta=5e5, factor=4.0, original_max_length=32)
    assert old.max_length == 128


@pytest.mark.parametrize(
    ("changes", "named", "allowed"),
    [
        ({"model_type": "gpt2"}, "'gpt2'", "llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "None", "llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "'gelu'", "silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'", "yarn"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'", "llama3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type", "one"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "0.5", ">= 1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor", ">= 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "fast": 1}}, "'fast'", "factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "leave it out"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not supported"),
        ({"attention_sinks": 4}, "attention_sinks", "not supported"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'", "full_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'", "full_attention"),
        ({"num_attention_heads": 5}, "hidden_size=32", "multiples of 5"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3", "divisors of num_heads=4"),
        ({"hidden_size": None}, "hidden_size=None", "integer"),
        ({"vocab_size": 0}, "vocab_size=0", ">= 1"),
        ({"head_dim": 7}, "head_dim=7", "even"),
    ],
)
def test_unsupported_features_are_refused_in_one_line(changes, named, allowed):
    with pytest.raises(ValueError) as error:
        read(**changes)
    message = str(error.value)
    assert named in message and allowed in message and "\n" not in message


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_survive_json_and_the_hugging_face_form(name):
    config = CONFIGS[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_a_config_no_family_has_is_not_written():
    config = dataclasses.replace(CONFIGS["llama"], qk_norm=True)
    with pytest.raises(ValueError, match="no Hugging Face form"):
        config.to_hf()


def test_an_unknown_key_is_named():
    raw = dataclasses.asdict(CONFIGS["llama"]) | {"depth": 3}
    with pytest.raises(ValueError, match="'depth'"):
        ModelConfig.from_dict(raw)
