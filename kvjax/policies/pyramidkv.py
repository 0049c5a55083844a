"""PyramidKV: SnapKV with more entries for the lower layers."""

from __future__ import annotations

from typing import Literal

from kvjax.policies.allocators import Pyramid
from kvjax.policies.base import Policy
from kvjax.policies.registry import register
from kvjax.policies.snapkv import SnapKV


@register("pyramidkv")
def pyramidkv(
    *,
    window: int = 32,
    kernel: int = 5,
    pooling: Literal["avg", "max"] = "avg",
    beta: int = 20,
) -> Policy:
    """SnapKV's scores under layer budgets that fall linearly from the first layer to the last.

    Paper: PyramidKV (arXiv 2406.02069). Defaults: window 32, average pooling of width 5, beta 20
    (the last layer's entries beside the window are the mean over beta).
    """
    scorer = SnapKV(window=window, kernel=kernel, pooling=pooling)
    return Policy(
        name="pyramidkv",
        scorer=scorer,
        protection=scorer.protection(),
        allocator=Pyramid(beta=beta, recent=window),
    )
