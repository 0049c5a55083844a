"""Shapes at which a latent memory is compiled in tests and measured in benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryShape:
    """One layer's cut of `slots` entries per head, and a read by `queries` tokens."""

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    features: int = 512
    slots: int
    queries: int = 1


# Llama-3.1-8B with the paper's 512 features.
SHAPES = {
    "cut-128-of-1152": MemoryShape(slots=1152),
    "cut-of-32k": MemoryShape(slots=32_768),
    "cut-of-128k": MemoryShape(slots=131_072, queries=64),
    "batch-16": MemoryShape(slots=1152, batch=16),
}
