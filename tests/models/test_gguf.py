"""GGUF files give the same model as a Hugging Face directory of the same weights."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest

from kvjax.models.checkpoint import load
from kvjax.models.gguf_file import unpermute
from kvjax.models.layout import layout
from kvjax.models.orbax import export_hf
from kvjax.models.rope import rope_frequencies
from tests.models.small import BASE, SPECIAL, TEMPLATE, random_model, small_vocabulary

FAMILIES = ("llama", "tied", "llama3", "qwen2", "qwen3")


def permute(values, heads):
    """The reordering of llama.cpp's converter, as it is written there."""
    rows = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def write_gguf(path, model, *, quantization=None, change=None, tokenizer=True, **keys):
    """Write a model as llama.cpp's converter does; `change` edits the tensors first."""
    c = model.config
    writer = gguf.GGUFWriter(path, c.family)
    writer.add_block_count(c.num_layers)
    writer.add_context_length(c.max_length)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope.theta)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    for key, value in keys.items():
        writer.add_uint32(f"{c.family}.{key.replace('__', '.')}", value)
    if tokenizer:
        write_tokenizer(writer)
    tensors = {}
    for row in layout(c):
        for layer in range(row.copies):
            value = np.asarray(model.parameters[row.name])
            value = value[layer] if row.stacked else value
            value = np.ascontiguousarray(value.T if row.transpose else value)
            if row.heads and c.family == "llama":
                value = np.ascontiguousarray(permute(value, row.heads))
            tensors[row.gguf.format(layer=layer)] = value
    if c.rope.kind == "llama3":
        plain = c.rope.theta ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
        tensors["rope_freqs.weight"] = (plain / rope_frequencies(c)[0]).astype(np.float32)
    if change is not None:
        change(tensors)
    for name, value in tensors.items():
        if quantization is not None and value.ndim == 2:
            packed = gguf.quants.quantize(value, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer):
    tokens, merges = small_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def comparable(name):
    """The model as GGUF can hold it: without windows."""
    model = random_model(name)
    config = dataclasses.replace(model.config, windows=())
    return type(model)(config, model.parameters)


@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_equals_safetensors_of_the_same_weights(name, tmp_path):
    model = comparable(name)
    from_gguf = load(write_gguf(tmp_path / "model.gguf", model)).model
    from_directory = load(export_hf(model, None, tmp_path / "model")).model
    assert from_gguf.config == from_directory.config
    for key, value in from_directory.parameters.items():
        np.testing.assert_array_equal(from_gguf.parameters[key], value, err_msg=key)
    assert from_gguf.fingerprint() == from_directory.fingerprint()


def test_quantised_tensors_are_dequantised(tmp_path):
    model = comparable("llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    # Only rows whose length is a multiple of the block can be quantised.
    config = dataclasses.replace(BASE, intermediate_size=64)
    model = type(model).random(config, _key())
    loaded = load(write_gguf(tmp_path / "model.gguf", model, quantization=kind)).model
    for name, value in model.parameters.items():
        error = np.abs(np.asarray(loaded.parameters[name]) - np.asarray(value)).max()
        assert error <= np.abs(value).max() / 127, name


def _key():
    import jax

    return jax.random.key(0)


def test_unpermute_inverts_the_converter_of_llama_cpp():
    values = np.arange(4 * 16 * 3).reshape(64, 3)
    np.testing.assert_array_equal(unpermute(permute(values, 4), 4), values)
    bias = np.arange(64)
    np.testing.assert_array_equal(unpermute(permute(bias, 4), 4), bias)


def test_the_tokenizer_comes_from_the_metadata(tmp_path):
    loaded = load(write_gguf(tmp_path / "model.gguf", comparable("llama")))
    text = "hello world 12 <|im_end|>"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text), False) == text
    assert loaded.tokenizer.end_tokens == {0, 2}
    bare = load(write_gguf(tmp_path / "bare.gguf", comparable("llama"), tokenizer=False))
    assert bare.tokenizer is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"change": lambda t: t.pop("blk.1.ffn_up.weight")}, "'blk.1.ffn_up.weight' is missing"),
        (
            {"change": lambda t: t.update({"blk.0.extra": np.ones(3, np.float32)})},
            "'blk.0.extra' is not part",
        ),
        (
            {"change": lambda t: t.update({"output_norm.weight": np.ones(3, np.float32)})},
            "(3,), expected (32,)",
        ),
        (
            {"change": lambda t: t["blk.2.attn_k.weight"].fill(np.nan)},
            "'blk.2.attn_k.weight' holds NaN",
        ),
        (
            {"change": lambda t: t.update({"rope_freqs.weight": np.ones(4, np.float32) * 3})},
            "rope_freqs.weight",
        ),
        ({"expert_count": 8}, "expert_count=8"),
        ({"attention__sliding_window": 16}, "attention.sliding_window=16"),
    ],
)
def test_bad_files_are_refused_in_one_line(options, named, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", comparable("llama"), **options)
    with pytest.raises(ValueError) as error:
        load(path)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_truncated_files_and_other_architectures_are_named(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", comparable("llama"))
    short = tmp_path / "short.gguf"
    short.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ValueError, match=r"short.gguf: truncated or damaged"):
        load(short)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'mamba': allowed are llama, qwen2, qwen3"):
        load(tmp_path / "other.gguf")
