"""Shapes at which decode attention is compiled in tests and measured in benchmarks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """One layer's step; slots are the capacity, `page` is of the paged cache."""

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    slots: int
    queries: int = 1
    page: int = 16
    layers: int = 32  # that share the paged cache's pool

    @property
    def pages_per_head(self) -> int:
        return -(-self.slots // self.page)

    @property
    def pool(self) -> int:
        """Pages of a row when every head of every layer is full."""
        return self.layers * self.kv_heads * (self.pages_per_head + 1)


# Llama-3.1-8B unless said otherwise.
SHAPES = {
    "budget-1024": DecodeShape(slots=1024),
    "budget-1024-batch-16": DecodeShape(slots=1024, batch=16),
    "full-32k": DecodeShape(slots=32_768),
    "full-128k": DecodeShape(slots=131_072, layers=2),
    "question-32-budget-1024": DecodeShape(slots=1024, queries=32),
    "smollm2-135m": DecodeShape(slots=1024, heads=9, kv_heads=3, size=64, layers=30),
    "head-size-80": DecodeShape(slots=1000, heads=32, kv_heads=32, size=80),
}
