"""Caches of Llama-3.1-8B (32 layers, 8 KV heads of 128) that are compacted: budgets and batches."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compaction:
    """Heads [L, B, K] of `slots` slots, of which `kept` stay; in pages of `page` slots."""

    layers: int = 32
    batch: int = 1
    kv_heads: int = 8
    slots: int
    kept: int
    head_dim: int = 128
    page: int | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.layers, self.batch, self.kv_heads


SHAPES = {
    # Every 128 decoded tokens, 1152 entries are cut back to 1024.
    "decode": Compaction(slots=1152, kept=1024),
    "decode, batch 16": Compaction(batch=16, slots=1152, kept=1024),
    # A budget of 1024 over a cache that has seen 4k or 128k tokens.
    "turn of 4k": Compaction(slots=4096, kept=1024),
    "one layer of 128k": Compaction(layers=1, slots=131072, kept=1024),
    # Uneven budgets: heads hold up to 4096 entries, 1024 on average.
    "pages": Compaction(slots=4096, kept=1024, page=16),
}
