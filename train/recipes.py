"""The recipe of a config."""

from __future__ import annotations

from collections.abc import Callable

from kvjax.budget import bucket_length
from train.config import TrainConfig
from train.data.config import ErasedConfig
from train.eraser import EraserRecipe
from train.indexer import IndexerRecipe
from train.indexmem import IndexMemRecipe
from train.memory import MemoryRecipe
from train.recipe import Recipe
from train.retention import RetentionRecipe


def recipe_of(config: TrainConfig) -> Recipe:
    """What trains the module that the config names."""
    recipes: dict[str, Callable[..., Recipe]] = {
        "indexer": IndexerRecipe,
        "indexmem": IndexMemRecipe,
        "memory": MemoryRecipe,
        "retention": RetentionRecipe,
    }
    if config.kind == "eraser":
        spans = [s.span_tokens[1] for s in config.data if isinstance(s, ErasedConfig)]
        return EraserRecipe(config.module, config.length, bucket_length(max(spans)))
    return recipes[config.kind](config.module, config.length)
