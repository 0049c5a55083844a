"""GGUF files of llama.cpp: config from metadata, weights dequantised tensor by tensor."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.layout import Parameter, layout
from kvjax.models.rope import rope_frequencies
from kvjax.models.weights import Index

ARCHITECTURES = ("llama", "qwen2", "qwen3")
FACTORS = "rope_freqs.weight"
# Metadata that changes the computation, with the values under which it changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (None, 0),
    "attention.sliding_window": (None, 0),
    "attention.logit_scale": (None,),
    "logit_scale": (None,),
    "rope.scaling.attn_factor": (None, 1.0),
}


class GGUFFile:
    """One open GGUF file; a `Source` of weights.

    Raises `ValueError` for a damaged or split file, and for an architecture or feature that
    the decoder does not compute, named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf: Any = importlib.import_module("gguf")
        try:
            self._reader = _open(self._gguf.GGUFReader, path)
        except Exception as error:
            raise ValueError(
                f"{path}: truncated or damaged GGUF file ({str(error).splitlines()[0]})"
            ) from error
        if (self.field("split.count") or 1) > 1:
            raise ValueError(f"{path}: split GGUF file; join it with llama-gguf-split --merge")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.field("general.architecture"))
        self.config = self._read_config()
        self._check_tensors()
        self._whole: tuple[str, np.ndarray] | None = None

    def field(self, key: str) -> Any:
        """The value of a metadata key, or None."""
        entry = self._reader.fields.get(key)
        return None if entry is None else entry.contents()

    def name(self, parameter: Parameter, layer: int) -> str:
        """The GGUF tensor name."""
        return parameter.gguf.format(layer=layer)

    def read(self, parameter: Parameter, layer: int, index: Index) -> np.ndarray:
        """The slice of a dequantised float32 tensor, rows in Hugging Face order."""
        name = self.name(parameter, layer)
        # Devices ask for the slices of one tensor in turn; only the latest is kept.
        if self._whole is None or self._whole[0] != name:
            tensor = self._tensors[name]
            values = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            values = np.asarray(values, np.float32)
            if parameter.heads and self.architecture == "llama":
                values = unpermute(values, parameter.heads)
            self._whole = (name, values)
        return self._whole[1][index]

    def _key(self, key: str, default: Any = None) -> Any:
        value = self.field(f"{self.architecture}.{key}")
        return default if value is None else value

    def _read_config(self) -> ModelConfig:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"GGUF architecture {self.architecture!r}: allowed are {', '.join(ARCHITECTURES)}"
            )
        for key, allowed in NEUTRAL.items():
            if self._key(key) not in allowed:
                raise ValueError(f"GGUF feature {key}={self._key(key)!r} is not supported")
        try:
            layers, hidden = self._key("block_count"), self._key("embedding_length")
            heads = self._key("attention.head_count")
            head_dim = self._key("attention.key_length", hidden // heads)
            rotary = self._key("rope.dimension_count", head_dim)
            config = ModelConfig(
                family=self.architecture,  # type: ignore[arg-type]
                vocab_size=int(self._tensors["token_embd.weight"].shape[-1]),
                hidden_size=hidden,
                intermediate_size=self._key("feed_forward_length"),
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=self._key("attention.head_count_kv", heads),
                head_dim=head_dim,
                norm_eps=_decimal(self._key("attention.layer_norm_rms_epsilon", 1e-6)),
                rope=self._read_rope(),
                max_length=self._key("context_length"),
                tie_embeddings="output.weight" not in self._tensors,
                qkv_bias="blk.0.attn_q.bias" in self._tensors,
                output_bias="blk.0.attn_output.bias" in self._tensors,
                mlp_bias="blk.0.ffn_gate.bias" in self._tensors,
                qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.path}: incomplete GGUF metadata ({error})") from error
        if rotary != head_dim:
            raise ValueError(f"GGUF feature rope.dimension_count={rotary}: allowed is {head_dim}")
        if self._key("attention.value_length", head_dim) != head_dim:
            raise ValueError(f"GGUF feature attention.value_length: allowed is {head_dim}")
        self._check_factors(config)
        return config

    def _read_rope(self) -> RopeConfig:
        theta = _decimal(self._key("rope.freq_base", 10_000.0))
        kind = self._key("rope.scaling.type", "none")
        factor = _decimal(self._key("rope.scaling.factor", 1.0))
        original = int(self._key("rope.scaling.original_context_length", 0))
        if FACTORS in self._tensors:
            # llama.cpp stores the divisors of Llama 3.1 instead of their parameters, of which
            # only the factor differs between releases; `_check_factors` verifies the guess.
            factor = float(np.max(self._tensors[FACTORS].data))
            return RopeConfig(kind="llama3", theta=theta, factor=factor, original_max_length=8192)
        if kind == "none":
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(kind="linear", theta=theta, factor=factor)
        if kind == "yarn":
            return RopeConfig(
                kind="yarn",
                theta=theta,
                factor=factor,
                original_max_length=original,
                beta_fast=self._key("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=self._key("rope.scaling.yarn_beta_slow", 1.0),
            )
        raise ValueError(f"GGUF rope scaling {kind!r}: allowed are none, linear, yarn")

    def _check_factors(self, config: ModelConfig) -> None:
        if config.rope.kind != "llama3":
            return
        frequencies, _ = rope_frequencies(config)
        plain = config.rope.theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        if not np.allclose(plain / frequencies, self._tensors[FACTORS].data, rtol=1e-3):
            raise ValueError(
                f"GGUF tensor {FACTORS!r} holds divisors that are not those of Llama 3.1 scaling: "
                "load the Hugging Face directory of this model instead"
            )

    def _check_tensors(self) -> None:
        expected = {
            self.name(row, layer): row for row in layout(self.config) for layer in range(row.copies)
        }
        if missing := sorted(set(expected) - set(self._tensors)):
            raise ValueError(f"{self.path}: tensor {missing[0]!r} is missing")
        if extra := sorted(set(self._tensors) - set(expected) - {FACTORS}):
            raise ValueError(f"{self.path}: tensor {extra[0]!r} is not part of this model")
        for name, row in expected.items():
            shape = tuple(int(size) for size in reversed(self._tensors[name].shape))
            if shape != row.source_shape:
                raise ValueError(
                    f"{self.path}: tensor {name!r} has shape {shape}, expected {row.source_shape}"
                )


def _open(reader: Any, path: Path) -> Any:
    class PlainReader(reader):
        """Reads through a plain view of the mapped file.

        The package slices an `np.memmap` for each of 100,000 vocabulary strings, and every
        slice of that subclass costs more than the read: this halves the time to open a file.
        """

        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, value: np.ndarray) -> None:
            self._data = np.asarray(value)

    return PlainReader(path)


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from llama.cpp's interleaved RoPE order to the half-split order.

    llama.cpp stores row 2i + j of a head where Hugging Face has row i + j * D/2.
    """
    split = values.reshape(heads, -1, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _decimal(value: float) -> float:
    # Metadata is float32; the shortest decimal is what the original config said (1e-05).
    return float(str(np.float32(value)))
