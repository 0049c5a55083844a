"""Sizes to compile and time: ReST-KV's score for one layer of Llama-3.1-8B."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call; `window` counts the queries, `slots` the cached entries."""

    batch: int
    slots: int
    window: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


SHAPES = {
    "prompt_4k": Shape(batch=16, slots=4096),
    "prompt_128k": Shape(batch=1, slots=131072),
    "smollm2_8k": Shape(batch=1, slots=8191, heads=9, kv_heads=3, head_dim=64),
}
