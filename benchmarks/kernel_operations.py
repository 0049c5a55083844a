"""What benchmarks/kernels.py times and tests/device compares: one declaration per operation.

Sizes are those of an operation's own shapes.py, or of one layer of Llama-3.1-8B.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import kernel_cases as cases
from benchmarks.kernel_cases import Case, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation's sizes by name, how a size becomes a case, and its implementations.

    `small` is for tests on a CPU; `checks` are compared with the reference on a device. `portable`
    starts with the reference; without `kernels` the last of them is what runs everywhere.
    """

    function: str  # module:name
    sizes: Mapping[str, Any]
    small: Any
    checks: Mapping[str, Any]
    case: Callable[[Callable[..., Any], Any], Case]
    portable: tuple[str, ...]
    kernels: bool = True

    def implementations(self, platform: str) -> tuple[str, ...]:
        """All that can run on a platform: "cpu", "gpu" or "tpu"."""
        kernel = f"mosaic_{platform}" if self.kernels and platform in ("gpu", "tpu") else None
        return self.portable if kernel is None else (*self.portable, kernel)

    def load(self) -> Callable[..., Any] | None:
        """The function; None where this version does not have it."""
        module, name = self.function.split(":")
        try:
            return getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError:
            return None


def _listed(
    package: str, convert: Callable[[Any], Size | None], otherwise: Mapping[str, Size]
) -> Mapping[str, Size]:
    """The sizes that an operation's own shapes.py names, where it has one."""
    try:
        named = importlib.import_module(f"kernels_pallas.{package}.shapes").SHAPES
    except ModuleNotFoundError:
        return otherwise
    sizes = {name: convert(shape) for name, shape in named.items()}
    return {name: size for name, size in sizes.items() if size is not None}


def _window(shape: Any) -> Size:
    return Size(
        tokens=shape.slots,
        batch=shape.batch,
        queries=shape.window,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )


def _prompt(shape: Any) -> Size:
    return Size(
        tokens=shape.tokens,
        batch=shape.batch,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )


def _compaction(shape: Any) -> Size | None:
    """Layers are more rows; pages have another layout."""
    if shape.page is not None:
        return None
    rows = shape.layers * shape.batch
    return Size(tokens=shape.slots, batch=rows, kv_heads=shape.kv_heads, kept=shape.kept)


def _pooled() -> Mapping[str, Any]:
    return importlib.import_module("kernels_pallas.pooled_max.shapes").SHAPES


def _pooled_check(**changes: Any) -> Any:
    shape = importlib.import_module("kernels_pallas.pooled_max.shapes").teacher(2, 1000)
    return dataclasses.replace(shape, **changes)


PROMPTS = {
    "prompt_4k": Size(tokens=4096),
    "prompt_4k_batch16": Size(tokens=4096, batch=16),
    "prompt_32k": Size(tokens=32768),
    "prompt_128k": Size(tokens=131072),
}
WINDOWS = {name: dataclasses.replace(size, queries=32) for name, size in PROMPTS.items()}
CACHES = {
    "budget_1024": Size(tokens=1024, queries=1),
    "budget_1024_batch16": Size(tokens=1024, queries=1, batch=16),
    "cache_32k_batch16": Size(tokens=32768, queries=1, batch=16),
    "cache_128k": Size(tokens=131072, queries=1),
}
COMPACTIONS = {"decode": Size(tokens=1152, batch=32), "turn_of_4k": Size(tokens=4096, batch=32)}
LITTLE = Size(tokens=96, heads=4, kv_heads=2, head_dim=16, kept=24, dtype="float32")
# Head sizes, groups and lengths that no block divides.
ODD = {
    "bfloat16_128": Size(tokens=1000, batch=2, heads=8, kv_heads=2),
    "bfloat16_64_group3": Size(tokens=777, heads=9, kv_heads=3, head_dim=64),
    "bfloat16_80": Size(tokens=640, heads=4, kv_heads=4, head_dim=80),
    "float32_64": Size(tokens=300, heads=8, kv_heads=1, head_dim=64, dtype="float32"),
}
FEW = {name: dataclasses.replace(size, queries=5) for name, size in ODD.items()}
ONE = {
    name: dataclasses.replace(size, queries=1, tokens=-(-size.tokens // 16) * 16)
    for name, size in ODD.items()
}
KEPT = {name: dataclasses.replace(size, kept=size.tokens // 3) for name, size in ODD.items()}

OPERATIONS = {
    "window_scores": Operation(
        function="kernels_pallas.window_scores:window_scores",
        sizes=_listed("window_scores", _window, WINDOWS),
        small=dataclasses.replace(LITTLE, queries=5),
        checks=FEW,
        case=cases.window_scores,
        portable=("reference",),
    ),
    "column_attention": Operation(
        function="kernels_pallas.column_attention:column_attention",
        sizes=_listed("column_attention", _prompt, PROMPTS),
        small=LITTLE,
        checks=ODD,
        case=cases.column_attention,
        portable=("reference", "blockwise"),
        kernels=False,
    ),
    "pooled_max": Operation(
        function="kernels_pallas.pooled_max:pooled_max",
        sizes=_pooled(),
        small=_pooled_check(batch=1, heads=4, kv_heads=2, size=16, length=96, dtype="float32"),
        checks={
            "bfloat16_128": _pooled_check(),
            "bfloat16_64_sum": _pooled_check(heads=9, kv_heads=3, size=64, reduce="sum"),
            "bfloat16_80": _pooled_check(heads=4, kv_heads=4, size=80, length=777),
            "float32_128": _pooled_check(heads=8, dtype="float32"),
            "indexer": _pooled_check(
                heads=8,
                kv_heads=1,
                size=16,
                dtype="float32",
                reduce="sum",
                activation="relu",
                weighted=True,
                offset=False,
            ),
            "last_queries": _pooled_check(queries=130),
        },
        case=cases.pooled_max,
        portable=("reference", "blockwise"),
    ),
    "gather_compact": Operation(
        function="kernels_pallas.gather_compact:compact",
        sizes=_listed("gather_compact", _compaction, COMPACTIONS),
        small=LITTLE,
        checks=KEPT,
        case=cases.compact,
        portable=("reference",),
    ),
    "select": Operation(
        function="kernels_pallas.select:keep_mask",
        sizes=PROMPTS,
        small=LITTLE,
        checks=KEPT,
        case=cases.select,
        portable=("reference", "threshold"),
    ),
    "decode_attention": Operation(
        function="kernels_pallas.ragged_decode:decode_attention",
        sizes=CACHES,
        small=dataclasses.replace(LITTLE, queries=1),
        checks=ONE,
        case=cases.decode_attention,
        portable=("reference", "dense"),
    ),
    "decode_mass": Operation(
        function="kernels_pallas.ragged_decode:decode_mass",
        sizes=CACHES,
        small=dataclasses.replace(LITTLE, queries=1),
        checks=ONE,
        case=cases.decode_mass,
        portable=("reference", "two_pass"),
    ),
    "paged_attention": Operation(
        function="kernels_pallas.ragged_decode:paged_attention",
        sizes=CACHES,
        small=dataclasses.replace(LITTLE, queries=1),
        checks=ONE,
        case=cases.paged_attention,
        portable=("reference", "split"),
    ),
    "retention_attention": Operation(
        function="kernels_pallas.retention_attention:retention_attention",
        sizes=PROMPTS,
        small=LITTLE,
        checks=ODD,
        case=cases.retention_attention,
        portable=("reference", "blockwise"),
    ),
    "occupancy": Operation(
        function="kernels_pallas.occupancy:occupancy",
        sizes=PROMPTS,
        small=LITTLE,
        checks=ODD,
        case=cases.occupancy,
        portable=("reference", "blockwise"),
        kernels=False,
    ),
}
