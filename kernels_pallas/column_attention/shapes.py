"""Sizes to compile and time: one layer of Llama-3.1-8B over a whole prompt."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one call: a prompt of `tokens` that attends to itself."""

    batch: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


SHAPES = {
    "prompt_4k": Shape(batch=16, tokens=4096),
    "prompt_32k": Shape(batch=1, tokens=32768),
    "prompt_64k": Shape(batch=1, tokens=65536),
    "prompt_128k": Shape(batch=1, tokens=131072),
}
