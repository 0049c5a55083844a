"""IndexMem's second stage: the indexer goes on learning, and a memory learns under it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Float

import kvjax
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy, Remainder
from kvjax.policy_arrays import SCORER_DIRECTORY
from train.indexer import IndexerRecipe, IndexerTraining
from train.memory import MemoryTraining, init_for, memory_loss, save
from train.recipe import Batch, Params
from train.start import started, with_stages

_INDEXER, _MEMORY = "indexer.", "memory."


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexMemTraining(IndexerTraining, MemoryTraining):
    """IndexMem (arXiv 2605.25475) with both its parts.

    loss = the indexer's divergence + memory_weight x the memory's regression

    What is evicted follows the indexer's scores of the same step, without a gradient through the
    choice. `start` is the directory of the indexer of the first stage; None begins with a fresh
    one. The paper gives no joint formula.
    """

    name: str = "indexmem"
    start: str | None = None
    memory_weight: float = 1.0

    def __post_init__(self) -> None:
        IndexerTraining.__post_init__(self)
        MemoryTraining.__post_init__(self)
        if not (math.isfinite(self.memory_weight) and self.memory_weight > 0):
            raise ValueError(f"module.memory_weight={self.memory_weight}: allowed: numbers > 0")

    def check_name(self) -> None:
        if self.name != "indexmem":
            raise ValueError(f"module.name={self.name!r}: allowed: indexmem")
        if self.selector_path is not None:
            raise ValueError(
                f"module.selector_path={self.selector_path!r}: the indexer is trained here; a "
                "directory to begin with is given as start"
            )

    def selector(self) -> Policy:
        """The indexer alone."""
        chosen = self.indexer
        policy = kvjax.policy(
            self.name, size=chosen.size, activation=chosen.activation, near=chosen.near
        )
        return dataclasses.replace(policy, remainder=Remainder())


class IndexMemRecipe:
    """Indexer and memory side by side; see `train.recipe.Recipe`."""

    def __init__(self, config: IndexMemTraining, length: int):
        self.config, self.selector = config, config.selector()
        self.indexer = IndexerRecipe(config, length)

    def init(self, model: Decoder, key: Array) -> Params:
        for_indexer, for_memory = jax.random.split(key)
        indexer = self.indexer.init(model, for_indexer)
        options = dataclasses.asdict(self.config.indexer)
        indexer = started(self.config.start, "indexer", options, indexer)
        return _joined(indexer, init_for(self.config.memory, model, for_memory))

    def axes(self, params: Params) -> dict[str, tuple[str | None, ...]]:
        indexer, memory = _parts(params)
        whole = {name: (None,) * array.ndim for name, array in memory.items()}
        return _joined(self.indexer.axes(indexer), whole)

    def fixed(self, model: Decoder) -> None:
        """Nothing."""

    def loss(
        self, params: Params, model: Decoder, batch: Batch, key: Array, fixed: None = None
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        indexer, memory = _parts(params)
        for_indexer, for_memory = jax.random.split(key)
        kl, told = self.indexer.loss(indexer, model, batch, for_indexer)
        lost, more = memory_loss(
            self.config,
            self.selector,
            lax.stop_gradient(indexer),
            memory,
            model,
            batch,
            for_memory,
        )
        return kl + self.config.memory_weight * lost, told | more

    def export(
        self, params: Params, model: Decoder, directory: Path, training: Mapping[str, Any]
    ) -> None:
        """The memory, with the indexer in a directory within it."""
        indexer, memory = _parts(params)
        training = with_stages(self.config.start, training)
        self.indexer.export(indexer, model, directory / SCORER_DIRECTORY, training)
        save(self.config.name, self.config.memory, memory, model, directory, training)


def _joined(indexer: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    named = {_INDEXER + name: value for name, value in indexer.items()}
    return named | {_MEMORY + name: value for name, value in memory.items()}


def _parts(params: Params) -> tuple[Params, Params]:
    def part(prefix: str) -> Params:
        return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}

    return part(_INDEXER), part(_MEMORY)
