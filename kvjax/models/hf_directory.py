"""Hugging Face directories: config.json and safetensors, single or sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.layout import Parameter, layout
from kvjax.models.weights import Index

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLED_REASON = (
    "pickled checkpoints are refused because unpickling runs code; only safetensors and GGUF "
    "are read"
)


class HFDirectory:
    """The weights of a local directory; a `Source` that maps files and copies slices.

    Raises `FileNotFoundError` or `ValueError`, one line, naming the file or tensor: no config,
    pickled weights only, a missing or truncated shard, tensors missing, left over or misshapen.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.raw_config = read_json(directory / CONFIG)
        self.generation_config = (
            read_json(directory / "generation_config.json")
            if (directory / "generation_config.json").exists()
            else None
        )
        self.config = ModelConfig.from_hf(self.raw_config)
        self._tensors: dict[str, Any] = {}
        for path in shard_paths(directory):
            handle = _open(path)
            self._tensors.update(dict.fromkeys(handle.keys(), (path, handle)))
        self._check()

    def name(self, parameter: Parameter, layer: int) -> str:
        """The safetensors name."""
        return parameter.source(layer)

    def read(self, parameter: Parameter, layer: int, index: Index) -> np.ndarray:
        """One slice, read from disk when asked for."""
        name = self.name(parameter, layer)
        _, handle = self._tensors[name]
        return handle.get_slice(name)[index]

    def _check(self) -> None:
        expected = {
            row.source(layer): row for row in layout(self.config) for layer in range(row.copies)
        }
        if missing := [name for name in expected if name not in self._tensors]:
            raise ValueError(
                f"{self.directory}: tensor {missing[0]!r} is missing"
                + (f" (and {len(missing) - 1} more)" if missing[1:] else "")
            )
        extra = sorted(set(self._tensors) - set(expected) - _ignored(self._tensors, self.config))
        if extra:
            raise ValueError(
                f"{self.directory}: tensor {extra[0]!r} is not part of this "
                f"{self.config.family} config" + (f" (and {len(extra) - 1} more)" * bool(extra[1:]))
            )
        for name, row in expected.items():
            path, handle = self._tensors[name]
            piece = handle.get_slice(name)
            shape = tuple(piece.get_shape())
            if shape != row.source_shape:
                raise ValueError(
                    f"{path}: tensor {name!r} has shape {shape}, expected {row.source_shape}"
                )
            if piece.get_dtype() not in DTYPES:
                raise ValueError(
                    f"{path}: tensor {name!r} has dtype {piece.get_dtype()}: allowed are "
                    f"{', '.join(DTYPES)}"
                )


def shard_paths(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, all of them present."""
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{directory / INDEX}: no weight_map")
        paths = [directory / name for name in sorted(set(weight_map.values()))]
        for path in paths:
            # An index is data from outside: it must not name files elsewhere.
            if path.parent != directory:
                raise ValueError(
                    f"{directory / INDEX}: shard {path.name!r} is not in the directory"
                )
            if not path.exists():
                raise FileNotFoundError(
                    f"{path}: shard listed in {INDEX} is missing: download it again"
                )
        return paths
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    if paths := sorted(directory.glob("*.safetensors")):
        return paths
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise ValueError(f"{directory / pickled[0]}: {PICKLED_REASON}")
    raise FileNotFoundError(f"{directory}: no .safetensors file; {_found(directory)}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises naming the file when it is missing or damaged."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; {_found(path.parent)}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is needed, not a {type(value).__name__}")
    return value


def _found(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())[:8]
    return f"the directory holds {', '.join(names) or 'nothing'}"


def _open(path: Path) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path}: truncated or damaged safetensors file ({error}): download it again"
        ) from error


def _ignored(names: dict[str, Any], config: ModelConfig) -> set[str]:
    # Old checkpoints store RoPE buffers, and some tied ones a second copy of the embedding.
    ignored = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    return ignored | ({"lm_head.weight"} if config.tie_embeddings else set())
