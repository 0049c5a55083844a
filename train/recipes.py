"""The recipe of a config."""

from __future__ import annotations

from typing import Any

from train.config import TrainConfig
from train.indexer import IndexerRecipe
from train.indexmem import IndexMemRecipe
from train.memory import MemoryRecipe
from train.recipe import Recipe
from train.retention import RetentionRecipe


def recipe_of(config: TrainConfig) -> Recipe:
    """What trains the module that the config names."""
    recipes: dict[str, Any] = {
        "indexer": IndexerRecipe,
        "indexmem": IndexMemRecipe,
        "memory": MemoryRecipe,
        "retention": RetentionRecipe,
    }
    return recipes[config.kind](config.module, config.length)
