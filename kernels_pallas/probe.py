"""What every operation would run here, found by tracing it at the shapes of Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import dispatch

_HEADS, _KV_HEADS, _SIZE = 32, 8, 128
_TOKENS, _WINDOW, _BUDGET, _PAGE = 4096, 32, 1024, 32


def probe(dtype: Any = jnp.bfloat16) -> dict[str, dispatch.Choice]:
    """The choice of each operation, by name. Traces only: nothing is compiled or computed."""
    found = {}
    for name, call, arguments in _calls(dtype):

        def fresh(*given: Any, call: Callable[..., Any] = call) -> Any:
            return call(*given)  # a function that JAX has not traced yet, so that it chooses anew

        jax.eval_shape(fresh, *arguments)
        found[name] = dispatch.choices()[name]
    return found


def _calls(dtype: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    from kernels_pallas.attention import attention, causal_attention
    from kernels_pallas.column_attention import column_attention
    from kernels_pallas.gather_compact import compact
    from kernels_pallas.latent_memory import memory_read, memory_update
    from kernels_pallas.occupancy import occupancy, occupancy_at
    from kernels_pallas.pooled_max import pooled_max
    from kernels_pallas.ragged_decode import (
        decode_attention,
        decode_mass,
        paged_attention,
        paged_mass,
    )
    from kernels_pallas.removal_error import removal_error
    from kernels_pallas.retention_attention import retention_attention, segment_attention
    from kernels_pallas.select import competing_threshold, keep_mask
    from kernels_pallas.window_scores import window_moments, window_scores

    def entries(heads: int, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, heads, count, _SIZE), dtype)

    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def mask(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bool_)

    keys, asked = entries(_KV_HEADS, _TOKENS), entries(_HEADS, _TOKENS)
    at, slots = integers(1, _TOKENS), integers(1, _KV_HEADS, _TOKENS)
    yield "causal_attention", causal_attention, (asked, keys, keys, at)
    yield "attention", attention, (asked, keys, keys, at, slots)
    few, few_at = entries(_HEADS, _WINDOW), integers(1, _WINDOW)
    yield "window_scores", window_scores, (few, keys, few_at, slots)
    yield "window_moments", window_moments, (few, keys, few_at, slots)
    group = _HEADS // _KV_HEADS
    weights = numbers(1, _KV_HEADS, group, _TOKENS)
    factor = numbers(_KV_HEADS, group * _SIZE, group * _SIZE)
    yield (
        "removal_error",
        partial(removal_error, joint=True),
        (weights, keys, slots, integers(1), factor),
    )
    yield (
        "column_attention",
        column_attention,
        (asked, numbers(1, _HEADS, _TOKENS), keys, at, slots),
    )

    rank, budgets = integers(1, _KV_HEADS, _TOKENS), integers(1, _KV_HEADS)
    yield (
        "keep_mask",
        keep_mask,
        (numbers(1, _KV_HEADS, _TOKENS), rank, mask(1, _KV_HEADS, _TOKENS), budgets),
    )
    order = jax.ShapeDtypeStruct((1, _KV_HEADS, _TOKENS), jnp.uint32)
    bounds = integers(1, _KV_HEADS)
    yield "competing_threshold", competing_threshold, (order, integers(1), bounds, bounds)
    kept = integers(1, _KV_HEADS, _BUDGET)
    yield "compact", lambda k, v, i, n: compact((k, v), i, n), (keys, keys, kept, budgets)

    one, one_at = entries(_HEADS, 1), integers(1, 1)
    cache = entries(_KV_HEADS, _BUDGET)
    held = integers(1, _KV_HEADS, _BUDGET)
    yield "decode_attention", decode_attention, (one, cache, cache, one_at, held, budgets)
    yield (
        "decode_mass",
        decode_mass,
        (one, cache, cache, one_at, held, budgets, numbers(1, _HEADS, 1)),
    )
    pages = _KV_HEADS * _BUDGET // _PAGE
    pool = jax.ShapeDtypeStruct((1, pages, _PAGE, _SIZE), dtype)
    table = integers(1, _KV_HEADS, _BUDGET // _PAGE)
    pool_at = integers(1, pages, _PAGE)
    paged = (one, pool, pool, pool_at, table, budgets, one_at)
    yield "paged_attention", paged_attention, paged
    yield "paged_mass", paged_mass, (*paged, numbers(1, _HEADS, 1))

    fading = numbers(1, _KV_HEADS, _TOKENS)
    yield "retention_attention", retention_attention, (asked, keys, keys, fading, at)
    yield "segment_attention", segment_attention, (asked, keys, keys, at)
    yield "occupancy", occupancy, (fading, at)
    yield "occupancy_at", occupancy_at, (fading, at, few_at)
    yield "pooled_max", pooled_max, (asked, keys, at, at)
    features = 512
    weights = numbers(_KV_HEADS, _SIZE, features)
    memory = (numbers(1, features, _KV_HEADS * _SIZE), numbers(1, features))
    leaving = (keys, keys, slots, mask(1, _KV_HEADS, _TOKENS), numbers(1))
    yield "memory_update", memory_update, (weights, *memory, *leaving)
    yield "memory_read", memory_read, (weights, *memory, entries(_KV_HEADS, 1))
