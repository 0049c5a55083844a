"""Checkpoints of our own (Orbax), and export for Hugging Face readers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.hf_directory import CONFIG, INDEX, read_json
from kvjax.models.layout import layout
from kvjax.models.sharding import ShardingRules, parameter_shardings
from kvjax.models.tokenizer import Tokenizer
from kvjax.tensor_files import write_tensors

CARD = "kvjax.json"
WEIGHTS = "weights"
TOKENIZER = "tokenizer"
FORMAT = 1


def is_checkpoint(directory: Path) -> bool:
    """Whether `save` wrote this directory."""
    return (directory / CARD).exists()


def save(model: Decoder, tokenizer: Tokenizer | None, directory: str | os.PathLike[str]) -> Path:
    """Write model and tokenizer as an Orbax directory that `load` restores to the bit.

    Nothing half written is left under `directory`: it is renamed into place at the end. Raises
    `FileExistsError` when it exists and is not empty.
    """
    import orbax.checkpoint as ocp

    with _staged(Path(directory)) as staging:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(staging / WEIGHTS, model.parameters)
        if tokenizer is not None:
            tokenizer.save(staging / TOKENIZER)
        card = {
            "format": FORMAT,
            "config": dataclasses.asdict(model.config),
            "dtype": jnp.dtype(model.dtype).name,
            "end_tokens": sorted(tokenizer.end_tokens) if tokenizer is not None else [],
            "fingerprint": model.fingerprint(),
        }
        _write_json(staging / CARD, card)
    return Path(directory)


def restore(
    directory: Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> tuple[Decoder, Tokenizer | None]:
    """Read what `save` wrote, in its own dtype unless another is given.

    Raises `ValueError` for another format or damaged weights.
    """
    import orbax.checkpoint as ocp

    card = read_json(directory / CARD)
    if card.get("format") != FORMAT:
        raise ValueError(f"{directory / CARD}: format {card.get('format')!r}: allowed is {FORMAT}")
    config = ModelConfig.from_dict(card["config"])
    shardings = {} if mesh is None else dict(parameter_shardings(config, mesh, rules))
    alone = SingleDeviceSharding(jax.local_devices()[0])
    stored = jnp.dtype(card["dtype"])
    target = {
        row.name: jax.ShapeDtypeStruct(row.shape, stored, sharding=shardings.get(row.name, alone))
        for row in layout(config)
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            parameters = checkpointer.restore((directory / WEIGHTS).absolute(), target)
    except (ValueError, KeyError, FileNotFoundError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{directory / WEIGHTS}: damaged Orbax checkpoint ({reason})") from error
    model = Decoder(config, parameters)
    if model.fingerprint() != card["fingerprint"]:
        raise ValueError(
            f"{directory / WEIGHTS}: the weights are not those that were saved (fingerprint "
            f"{model.fingerprint()}, expected {card['fingerprint']})"
        )
    if dtype is not None and jnp.dtype(dtype) != stored:
        cast = {name: value.astype(dtype) for name, value in parameters.items()}
        model = Decoder(config, cast)
    tokenizer = None
    if (directory / TOKENIZER).is_dir():
        tokenizer = Tokenizer.from_directory(directory / TOKENIZER, card["end_tokens"])
    return model, tokenizer


def export_hf(
    model: Decoder,
    tokenizer: Tokenizer | None,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 4 * 2**30,
) -> Path:
    """Write config.json, safetensors and tokenizer files for a Hugging Face reader.

    One shard at a time is held on the host. Raises `ValueError` for a config without a Hugging
    Face form and `FileExistsError` for a directory that is not empty.
    """
    config = model.config.to_hf()
    config["torch_dtype"] = jnp.dtype(model.dtype).name
    shards = _plan_shards(model, max_shard_bytes)
    with _staged(Path(directory)) as staging:
        weight_map = {}
        for number, names in enumerate(shards, start=1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {name: _tensor(model, row, layer) for name, (row, layer) in names.items()}
            write_tensors(staging / file, tensors, {"format": "pt"})
            weight_map.update(dict.fromkeys(tensors, file))
        if len(shards) > 1:
            sizes = {"total_size": model.nbytes}
            _write_json(staging / INDEX, {"metadata": sizes, "weight_map": weight_map})
        if tokenizer is not None:
            tokenizer.save(staging)
            config["eos_token_id"] = sorted(tokenizer.end_tokens)
            generation = {"eos_token_id": config["eos_token_id"]}
            _write_json(staging / "generation_config.json", generation)
        _write_json(staging / CONFIG, config)
    return Path(directory)


def _plan_shards(model: Decoder, max_bytes: int) -> list[dict[str, tuple[Any, int]]]:
    shards: list[dict[str, tuple[Any, int]]] = [{}]
    filled = 0
    for row in layout(model.config):
        size = int(np.prod(row.layer_shape)) * jnp.dtype(model.dtype).itemsize
        for layer in range(row.copies):
            if shards[-1] and filled + size > max_bytes:
                shards.append({})
                filled = 0
            shards[-1][row.source(layer)] = (row, layer)
            filled += size
    return shards


def _tensor(model: Decoder, row: Any, layer: int) -> np.ndarray:
    value = model.parameters[row.name]
    piece = np.asarray(value[layer] if row.stacked else value)
    return np.ascontiguousarray(piece.T if row.transpose else piece)


@contextlib.contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """A directory beside the target that becomes it on success and vanishes on failure."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not empty: name a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.absolute().parent))
    try:
        yield staging
        staging.chmod(0o755)  # mkdtemp makes it private
        staging.replace(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
