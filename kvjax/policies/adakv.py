"""Ada-SnapKV: SnapKV whose heads share their layer's budget."""

from __future__ import annotations

from kvjax.policies.allocators import Ada
from kvjax.policies.base import Policy
from kvjax.policies.registry import register
from kvjax.policies.snapkv import SnapKV


@register("ada-snapkv")
def ada_snapkv(
    window: int = 32, kernel: int = 7, floor: float = 0.2, normalize: bool = False
) -> Policy:
    """SnapKV with max pooling; the heads of a layer compete for its budget above a floor.

    Head h keeps its window and (1 - floor) f_h + floor base entries, base being the budget
    without the window and f_h the head's share of the layer's top (K x base) scores.

    Paper: Ada-KV (arXiv 2407.11550). Defaults: window 32, max pooling of width 7, floor 0.2.
    Deviations: heads are KV heads, the score is averaged over the query group before pooling;
    the split is rounded so that the heads' budgets add up exactly.
    """
    scorer = SnapKV(window=window, kernel=kernel, pooling="max")
    return Policy(
        name="ada-snapkv",
        scorer=scorer,
        protection=scorer.protection(),
        allocator=Ada(floor=floor, normalize=normalize),
        schedule=scorer.schedule(),
    )
