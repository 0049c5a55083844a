"""The eraser: LoRA adapters with which the backbone re-encodes a span that is to be forgotten."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.learned import modules
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Adapters, Decoder
from kvjax.models.layout import layout
from kvjax.whole import check_whole

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KIND, MODULE = "eraser", "kveraser"
type Stored = Literal["float32", "float16"]
STORED: tuple[Stored, ...] = ("float32", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EraserConfig:
    """The shape of the adapters; the defaults are those of the released KVEraser.

    LoRA (arXiv 2106.09685): y = x W + alpha / rank (x A) B, in every layer, for the projections
    named in `targets`. KVEraser (arXiv 2606.17034): rank 16, alpha 32, all seven.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha={self.alpha}: allowed are finite numbers above 0")
        wrong = [name for name in self.targets if name not in PROJECTIONS]
        if wrong or not self.targets or len(set(self.targets)) < len(self.targets):
            allowed = ", ".join(PROJECTIONS)
            raise ValueError(f"targets={self.targets}: allowed are some of {allowed}, each once")

    @property
    def scale(self) -> float:
        """The factor on (x A) B."""
        return self.alpha / self.rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Eraser:
    """Adapters of one backbone; a pytree whose leaves are the trained arrays."""

    config: EraserConfig = dataclasses.field(metadata={"static": True})
    arrays: dict[str, Array]  # "q_proj.a" [L, F, R], "q_proj.b" [L, R, O], ...; float32

    @property
    def adapters(self) -> Adapters:
        """What a scan over layers hands to `DecoderLayer`: (A, scale B) for each projection."""
        return {
            name: (self.arrays[f"{name}.a"], self.config.scale * self.arrays[f"{name}.b"])
            for name in self.config.targets
        }


def eraser_shapes(config: EraserConfig, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every array: A [L, F, R] and B [L, R, O] of a projection from F to O."""
    rows = {row.name.removeprefix("layers."): row.shape for row in layout(model)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in config.targets:
        layers, inputs, outputs = rows[name]
        shapes[f"{name}.a"] = (layers, inputs, config.rank)
        shapes[f"{name}.b"] = (layers, config.rank, outputs)
    return shapes


def parameter_count(config: EraserConfig, model: ModelConfig) -> int:
    """rank x layers x the sum of (inputs + outputs) over the projections."""
    return sum(math.prod(shape) for shape in eraser_shapes(config, model).values())


def init_eraser(config: EraserConfig, key: Array, model: ModelConfig) -> Eraser:
    """A from U(-F^-1/2, F^-1/2), B = 0: an eraser that changes nothing yet.

    The distribution of A is that of the PEFT library, whose format the released adapter has.
    """
    arrays = {}
    for index, (name, shape) in enumerate(eraser_shapes(config, model).items()):
        if name.endswith(".a"):
            bound = shape[1] ** -0.5
            drawn = jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.float32, -1, 1)
            arrays[name] = bound * drawn
        else:
            arrays[name] = jnp.zeros(shape, jnp.float32)
    return Eraser(config=config, arrays=arrays)


def check_eraser(eraser: Eraser, model: ModelConfig) -> None:
    """Refuses arrays that are not those of the eraser's config for this model.

    Raises:
      ValueError: a missing or unknown array, or one of another shape or dtype.
    """
    shapes = eraser_shapes(eraser.config, model)
    wanted = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in shapes.items()}
    modules.check_arrays(eraser.arrays, wanted, "eraser")


def save_eraser(
    directory: str | Path,
    eraser: Eraser,
    model: Decoder,
    *,
    backbone: str,
    training: Mapping[str, Any] | None = None,
    scores: Mapping[str, Any] | None = None,
    stored: Stored = "float32",
) -> None:
    """Exports an eraser with its card, for `load_eraser`; `backbone` is the model's name.

    `stored` is the dtype in the file, whatever it was trained in.
    """
    check_eraser(eraser, model.config)
    if stored not in STORED:
        raise ValueError(f"stored={stored!r}: allowed are {', '.join(STORED)}")
    card = modules.Card(
        module=MODULE,
        kind=KIND,
        options=dataclasses.asdict(eraser.config),
        backbone=backbone,
        fingerprints=modules.fingerprints(model),
        training=training or {},
        scores=scores or {},
    )
    arrays = {name: np.asarray(array).astype(stored) for name, array in eraser.arrays.items()}
    modules.save_module(directory, arrays, card)


def read_adapters(directory: str | Path) -> dict[str, Array]:
    """An exported eraser's arrays, float32 whatever they are stored in."""
    arrays = modules.read_arrays(directory)
    return {name: array.astype(jnp.float32) for name, array in arrays.items()}


def eraser_directory(model: Decoder, path: str | Path | None = None) -> Path:
    """Where the eraser lies that `load_eraser` reads.

    Raises:
      FileNotFoundError: none ships for this backbone.
    """
    if path is not None:
        return Path(path).expanduser()
    return modules.find_shipped(MODULE, model.fingerprint())


def load_eraser(model: Decoder, path: str | Path | None = None) -> Eraser:
    """The eraser exported to `path`, or the one that ships for this backbone.

    Raises:
      FileNotFoundError: none there.
      ValueError: a module of another kind or backbone, or a damaged one.
    """
    directory = eraser_directory(model, path)
    card = modules.read_card(directory)
    if card.kind != KIND:
        raise ValueError(f"{directory}: a module of kind {card.kind!r}; needed is {KIND!r}")
    card.check_backbone(model.fingerprint(), directory)
    config = modules.config_of(card, EraserConfig, directory)
    eraser = Eraser(config=config, arrays=read_adapters(directory))
    try:
        check_eraser(eraser, model.config)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    return eraser
