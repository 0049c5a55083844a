"""Rows of Llama-3.1-8B (32 layers, 8 KV heads) in which entries are selected."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Rows [L, B, K] of `slots` slots each; with `competing`, the heads of all layers compete."""

    layers: int = 1
    batch: int = 1
    kv_heads: int = 8
    slots: int
    competing: bool = False

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.layers, self.batch, self.kv_heads


SHAPES = {
    "prefill of 4k": Selection(slots=4096),
    "prefill of 128k": Selection(slots=131072),
    "prefill of 128k, batch 16": Selection(batch=16, slots=131072),
    "decode": Selection(layers=32, slots=1152),
    "decode, batch 16": Selection(layers=32, batch=16, slots=1152),
    # Up to four times the budget of 1024 are candidates.
    "all layers": Selection(layers=32, slots=4096, competing=True),
    "all layers, batch 16": Selection(layers=32, batch=16, slots=4096, competing=True),
}
