"""What a training run is: model, module, data, optimizer, mesh; read from YAML."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval import fields
from kvjax.models.sharding import MESH_AXES
from train import data
from train.data.config import ErasedConfig, SourceConfig
from train.eraser import EraserTraining
from train.indexer import IndexerTraining
from train.indexmem import IndexMemTraining
from train.memory import MemoryTraining
from train.optimizer import OptimizerConfig
from train.retention import RetentionConfig

type ModuleConfig = (
    EraserTraining | IndexerTraining | IndexMemTraining | MemoryTraining | RetentionConfig
)
MODULES: dict[str, Any] = {
    "eraser": EraserTraining,
    "indexer": IndexerTraining,
    "indexmem": IndexMemTraining,
    "memory": MemoryTraining,
    "retention": RetentionConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved: after so many steps or minutes, whichever comes first."""

    steps: int = 200
    minutes: float = 5.0
    keep: int = 3

    def __post_init__(self) -> None:
        fields.integer("checkpoint.steps", self.steps, 1)
        fields.positive("checkpoint.minutes", self.minutes)
        fields.integer("checkpoint.keep", self.keep, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    model: str
    kind: str  # of the module, a key of MODULES
    module: ModuleConfig
    data: tuple[SourceConfig, ...]
    length: int  # tokens of a row
    steps: int
    batch: int = 1  # rows of a step, over all devices
    # Independent streams of data that a batch is made of; None: one per process at the start.
    data_shards: int | None = None
    accumulation: int = 1  # steps whose gradients make one update
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)  # axis: size; -1: the rest
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: int = 10  # steps between lines of the metrics
    explode: float = 20.0  # stop where the loss is so many times its recent largest
    seed: int = 0
    output: str = "runs/train"

    def __post_init__(self) -> None:
        if self.steps % self.accumulation:
            raise ValueError(
                f"steps={self.steps}: allowed are multiples of accumulation={self.accumulation}; "
                "the last gradients would be lost"
            )

    @property
    def hash(self) -> str:
        """Of all that changes a step; more steps would change the schedule, so they are in it."""
        content = dataclasses.asdict(self)
        for name in ("output", "checkpoint", "log", "explode", "mesh", "data_shards"):
            del content[name]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: str | Path) -> TrainConfig:
    """Reads a YAML file.

    Raises:
      ValueError: in one line: the key, what was given, what is allowed.
    """
    content = fields.yaml_file(path)
    try:
        return from_mapping(content)
    except ValueError as error:
        raise ValueError(f"config {str(path)!r}: {error}") from error


def from_mapping(content: Any) -> TrainConfig:
    """Checks and builds; errors as in `load`, without the path."""
    given = fields.mapping(
        "the file",
        content,
        TrainConfig,
        required=("model", "module", "data", "length", "steps"),
        aliases={"kind": "module.kind"},  # it is read from within `module`
    )
    kind, module = _module(given["module"])
    values: dict[str, Any] = {
        "model": fields.text("model", given["model"]),
        "kind": kind,
        "module": module,
        "data": data.config.read("data", given["data"]),
        "length": fields.integer("length", given["length"], 2),
        "steps": fields.integer("steps", given["steps"], 1),
    }
    for name, least in (
        ("batch", 1),
        ("data_shards", 1),
        ("accumulation", 1),
        ("log", 1),
        ("seed", 0),
    ):
        if name in given:
            values[name] = fields.integer(name, given[name], least)
    if "explode" in given:
        values["explode"] = fields.positive("explode", given["explode"])
    if "output" in given:
        values["output"] = fields.text("output", given["output"])
    for name, cls in (("optimizer", OptimizerConfig), ("checkpoint", CheckpointConfig)):
        if name in given:
            values[name] = _section(name, given[name], cls)
    if "mesh" in given:
        values["mesh"] = _mesh(given["mesh"])
    for number, source in enumerate(values["data"]):
        if isinstance(source, ErasedConfig) != (kind == "eraser"):
            fits = "sources with" if kind == "eraser" else "sources without"
            raise ValueError(f"data[{number}]: module kind {kind!r} reads {fits} `erase`")
    return TrainConfig(**values)


def _module(content: Any) -> tuple[str, ModuleConfig]:
    if not isinstance(content, Mapping) or "kind" not in content:
        raise fields.error("module", content, f"a mapping with kind: {', '.join(MODULES)}")
    kind = fields.choice("module.kind", content["kind"], tuple(MODULES))
    rest = {name: value for name, value in content.items() if name != "kind"}
    return kind, _section("module", rest, MODULES[kind])


def _section[C](key: str, content: Any, cls: type[C]) -> C:
    """A dataclass of plain values; types are those of its fields, ranges are its own affair."""
    given = fields.mapping(key, content, cls, required=())
    hints = typing.get_type_hints(cls)
    values = {name: _typed(f"{key}.{name}", value, hints[name]) for name, value in given.items()}
    return cls(**values)


def _typed(key: str, value: Any, hint: Any) -> Any:
    if isinstance(hint, typing.TypeAliasType):
        hint = hint.__value__
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None:
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return fields.choice(key, value, typing.get_args(hint))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        names = {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts"}
        raise fields.error(key, value, names.get(hint, str(hint)))
    return value


def _mesh(content: Any) -> dict[str, int]:
    if not isinstance(content, Mapping) or not content:
        raise fields.error("mesh", content, f"a mapping of {', '.join(MESH_AXES)} to sizes")
    sizes = {}
    for name, size in content.items():
        axis = fields.choice("mesh", name, MESH_AXES)
        rest = size == -1 and not isinstance(size, bool)
        sizes[axis] = -1 if rest else fields.integer(f"mesh.{axis}", size, 1)
    if list(sizes.values()).count(-1) > 1:
        raise fields.error("mesh", dict(content), "one axis of size -1 at most")
    return sizes
