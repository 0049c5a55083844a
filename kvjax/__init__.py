"""kvjax: long contexts in bounded memory.

Names load on first use, so that `import kvjax` does not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS = {
    # Models
    "kvjax.models.checkpoint": ("Loaded", "load"),
    "kvjax.models.config": ("ModelConfig",),
    "kvjax.models.decoder": ("Decoder",),
    # Budgets and caches
    "kvjax.budget": ("Budget", "bucket_length"),
    "kvjax.cache": ("PaddedCache", "PagedCache", "Pages", "nbytes", "stack_rows", "take_rows"),
    "kvjax.cache.entries": ("modality_counts",),
    "kvjax.cache.rerotate": ("rerotate",),
    "kvjax.cache.rollback": ("rollback",),
    "kvjax.cache.storage": ("load_cache", "save_cache"),
    # Policies
    "kvjax.policies": (
        "Policy", "Protection", "Schedule", "Scorer", "policy", "policy_names", "register",
    ),
    "kvjax.policy_arrays": ("load_policy", "policy_params"),
    # Decoding
    "kvjax.generation": ("Generation", "Sampling"),
    "kvjax.inference": (
        "compress", "extend", "generate", "observe", "prefill", "replay", "stream",
    ),
    "kvjax.likelihood": ("log_likelihood",),
    # Erasing
    "kvjax.erasing": ("erase", "erasing_method"),
    "kvjax.learned.eraser": ("Eraser", "EraserConfig", "init_eraser", "load_eraser"),
    # Conversations
    "kvjax.session": ("Session",),
}  # fmt: skip
_HOMES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from kvjax.budget import Budget, bucket_length
    from kvjax.cache import PaddedCache, PagedCache, Pages, nbytes, stack_rows, take_rows
    from kvjax.cache.entries import modality_counts
    from kvjax.cache.rerotate import rerotate
    from kvjax.cache.rollback import rollback
    from kvjax.cache.storage import load_cache, save_cache
    from kvjax.erasing import erase, erasing_method
    from kvjax.generation import Generation, Sampling
    from kvjax.inference import compress, extend, generate, observe, prefill, replay, stream
    from kvjax.learned.eraser import Eraser, EraserConfig, init_eraser, load_eraser
    from kvjax.likelihood import log_likelihood
    from kvjax.models.checkpoint import Loaded, load
    from kvjax.models.config import ModelConfig
    from kvjax.models.decoder import Decoder
    from kvjax.policies import (
        Policy,
        Protection,
        Schedule,
        Scorer,
        policy,
        policy_names,
        register,
    )
    from kvjax.policy_arrays import load_policy, policy_params
    from kvjax.session import Session


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
