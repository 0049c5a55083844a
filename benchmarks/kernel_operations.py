"""What benchmarks/kernels.py times and tests/device compares: one declaration per operation.

Sizes are those of an operation's own shapes.py, or of one layer of Llama-3.1-8B.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import kernel_cases as cases
from benchmarks.kernel_sizes import Case, Size
from kernels_pallas.pooled_max import shapes as pooled_max_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation's sizes by name, and how a size becomes a case.

    `small` is for tests on a CPU; `checks` are compared with the reference on a device. Variants
    of an operation are compared only, and have no `sizes` to time.
    """

    function: str  # module:name
    case: Callable[[Callable[..., Any], Any], Case]
    sizes: Mapping[str, Any]
    small: Any
    checks: Mapping[str, Any]

    def load(self) -> Callable[..., Any] | None:
        """The function; None where this version does not have it."""
        module, name = self.function.split(":")
        try:
            return getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError:
            return None

    def implementations(self, platform: str) -> tuple[str, ...]:
        """All that run on a platform, "cpu", "gpu" or "tpu": the reference first, a kernel last.

        They are those that the function's `implementation` allows.
        """
        function = inspect.unwrap(self.load())
        allowed = typing.get_type_hints(function)["implementation"]
        names = _texts(allowed)
        return (
            *(name for name in names if not name.startswith("mosaic_")),
            *(name for name in names if name == f"mosaic_{platform}"),
        )


def _texts(annotation: Any) -> tuple[str, ...]:
    """The strings of an optional Literal, also behind a `type` statement."""
    if isinstance(annotation, str):
        return (annotation,)
    parts = typing.get_args(getattr(annotation, "__value__", annotation))
    return tuple(text for part in parts for text in _texts(part))


# What shapes.py of the operations call a size's fields.
_FIELDS = {
    "tokens": ("tokens", "slots", "length"),
    "queries": ("queries", "window"),
    "head_dim": ("head_dim", "size"),
    **{name: (name,) for name in ("batch", "heads", "kv_heads", "kept", "page", "dtype")},
}


def sizes_of(
    package: str, otherwise: Mapping[str, Size], *, layers: bool = False
) -> Mapping[str, Size]:
    """The sizes that an operation's own shapes.py names, where it has one.

    With `layers` those of a shape are more rows of its batch. Left out are shapes of another kind
    of cache, or of heads that compete across layers.
    """
    try:
        named = importlib.import_module(f"kernels_pallas.{package}.shapes").SHAPES
    except ModuleNotFoundError:
        return otherwise
    sizes = {}
    for name, shape in named.items():
        given = dataclasses.asdict(shape)
        if layers and (given.get("page") or given.get("competing")):
            continue
        fields = {
            field: given[alias]
            for field, aliases in _FIELDS.items()
            for alias in aliases
            if given.get(alias) is not None
        }
        if layers:
            fields["batch"] *= given["layers"]
        sizes[name] = Size(**fields)
    return sizes


def two_of(sizes: Mapping[str, Size]) -> dict[str, Size]:
    """An odd size of either type, for the variants of an operation."""
    return {name: sizes[name] for name in ("bfloat16_64_group3", "float32_64")}


def with_options(case: Callable[..., Case], **options: Any) -> Callable[..., Case]:
    """Cases of the same operands, of a function with these options."""

    def build(function: Callable[..., Any], size: Any) -> Case:
        return case(partial(function, **options), size)

    return build


def pooled(**changes: Any) -> pooled_max_shapes.Shape:
    return dataclasses.replace(pooled_max_shapes.teacher(2, 1000), **changes)


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
WIDE = Size(tokens=300, heads=4, kv_heads=2, dtype="float32")
FEW = {name: dataclasses.replace(size, queries=5) for name, size in ODD.items()}
ONE = {
    name: dataclasses.replace(size, queries=1, tokens=-(-size.tokens // 16) * 16)
    for name, size in ODD.items()
}
PAGED = {name: dataclasses.replace(size, kept=size.tokens // 3) for name, size in ONE.items()}
MANY = {
    "moments_of_a_group_of_8": Size(tokens=500, heads=16, kv_heads=2, queries=32),
    "float32_128": Size(tokens=500, heads=8, kv_heads=1, queries=32, dtype="float32"),
}
KEPT = {name: dataclasses.replace(size, kept=size.tokens // 3) for name, size in ODD.items()}

OPERATIONS = {
    "window_scores": Operation(
        function="kernels_pallas.window_scores:window_scores",
        case=cases.window_scores,
        sizes=sizes_of("window_scores", WINDOWS),
        small=dataclasses.replace(LITTLE, queries=5),
        checks=FEW,
    ),
    "window_scores_of_heads": Operation(
        function="kernels_pallas.window_scores:window_scores",
        case=with_options(cases.window_scores, over_queries="max", over_group=None),
        sizes={},
        small=dataclasses.replace(LITTLE, queries=5),
        checks=two_of(FEW) | {"last_query": Size(tokens=4001, queries=1)},
    ),
    "window_moments": Operation(
        function="kernels_pallas.window_scores:window_moments",
        case=cases.window_scores,
        sizes={},
        small=dataclasses.replace(LITTLE, queries=5),
        checks=two_of(FEW) | MANY,
    ),
    "removal_error": Operation(
        function="kernels_pallas.removal_error:removal_error",
        case=cases.removal_error,
        sizes=sizes_of("removal_error", PROMPTS),
        small=LITTLE,
        checks=ODD,
    ),
    "column_attention": Operation(
        function="kernels_pallas.column_attention:column_attention",
        case=cases.column_attention,
        sizes=sizes_of("column_attention", PROMPTS),
        small=LITTLE,
        checks=ODD,
    ),
    **{
        f"column_{statistic}": Operation(
            function="kernels_pallas.column_attention:column_attention",
            case=with_options(cases.column_attention, statistic=statistic),
            sizes={},
            small=LITTLE,
            checks=two_of(ODD),
        )
        for statistic in ("mean", "max")
    },
    "pooled_max": Operation(
        function="kernels_pallas.pooled_max:pooled_max",
        case=cases.pooled_max,
        sizes=pooled_max_shapes.SHAPES,
        small=pooled(batch=1, heads=4, kv_heads=2, size=16, length=96, dtype="float32"),
        checks={
            "bfloat16_128": pooled(),
            "bfloat16_64_sum": pooled(heads=9, kv_heads=3, size=64, reduce="sum"),
            "bfloat16_80": pooled(heads=4, kv_heads=4, size=80, length=777),
            "float32_128": pooled(heads=8, dtype="float32"),
            "indexer": dataclasses.replace(pooled_max_shapes.indexer(2, 1001), offset=True),
            "last_queries": pooled(queries=130),
        },
    ),
    "gather_compact": Operation(
        function="kernels_pallas.gather_compact:compact",
        case=cases.compact,
        sizes=sizes_of("gather_compact", COMPACTIONS, layers=True),
        small=LITTLE,
        checks=KEPT,
    ),
    "gather_compact_pages": Operation(
        function="kernels_pallas.gather_compact:compact",
        case=cases.compact_pages,
        sizes={},
        small=LITTLE,
        checks=two_of(PAGED),
    ),
    "select": Operation(
        function="kernels_pallas.select:keep_mask",
        case=cases.select,
        sizes=sizes_of("select", PROMPTS, layers=True),
        small=LITTLE,
        checks=KEPT,
    ),
    "decode_attention": Operation(
        function="kernels_pallas.ragged_decode:decode_attention",
        case=cases.decode_attention,
        sizes=sizes_of("ragged_decode", CACHES),
        small=dataclasses.replace(LITTLE, queries=1),
        checks=ONE | {"odd_slots": Size(tokens=1001, queries=1)},
    ),
    "decode_mass": Operation(
        function="kernels_pallas.ragged_decode:decode_mass",
        case=cases.decode_mass,
        sizes=sizes_of("ragged_decode", CACHES),
        small=dataclasses.replace(LITTLE, queries=1),
        checks=ONE | {"odd_slots": Size(tokens=1001, queries=1)},
    ),
    "paged_attention": Operation(
        function="kernels_pallas.ragged_decode:paged_attention",
        case=cases.paged_attention,
        sizes=sizes_of("ragged_decode", CACHES),
        small=dataclasses.replace(LITTLE, queries=1),
        checks=ONE,
    ),
    "paged_mass": Operation(
        function="kernels_pallas.ragged_decode:paged_mass",
        case=cases.paged_mass,
        sizes={},
        small=dataclasses.replace(LITTLE, queries=1),
        checks=two_of(ONE),
    ),
    "segment_attention": Operation(
        function="kernels_pallas.retention_attention:segment_attention",
        case=cases.segment_attention,
        sizes={},
        small=LITTLE,
        checks=two_of(ODD) | {"float32_128": WIDE},
    ),
    "retention_attention": Operation(
        function="kernels_pallas.retention_attention:retention_attention",
        case=cases.retention_attention,
        sizes=sizes_of("retention_attention", PROMPTS),
        small=LITTLE,
        checks=ODD | {"float32_128": WIDE},
    ),
    "retention_gradient": Operation(
        function="kernels_pallas.retention_attention:retention_attention",
        case=cases.retention_gradient,
        sizes=sizes_of("retention_attention", PROMPTS),
        small=LITTLE,
        checks=ODD | {"float32_128": WIDE},
    ),
    "occupancy": Operation(
        function="kernels_pallas.occupancy:occupancy",
        case=cases.occupancy,
        sizes=PROMPTS,
        small=LITTLE,
        checks=ODD,
    ),
    "latent_memory": Operation(
        function="kernels_pallas.latent_memory:memory_update",
        case=cases.memory_update,
        sizes=sizes_of("latent_memory", PROMPTS),
        small=LITTLE,
        checks=ODD,
    ),
}
