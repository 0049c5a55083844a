"""One call of each kernel operation: its arguments, and the bytes and FLOPs that it needs.

Sizes are those of Llama-3.1-8B. Bytes and FLOPs are what the mathematics needs: every operand read
once, every result written once, and of causal attention the half that is seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_sizes import Case, Size, close, close_in_units_of_largest


def _touched(size: Size, queries: int, slots: int, results: int) -> float:
    """Bytes of queries, of keys and values, and of float32 results."""
    item = jnp.dtype(size.dtype).itemsize
    rows = size.batch * size.head_dim * item
    return rows * (2 * size.heads * queries + 2 * size.kv_heads * slots) + 4.0 * results


def window_scores(function: Callable[..., Any], size: Size) -> Case:
    item = jnp.dtype(size.dtype).itemsize
    rows = size.batch * size.head_dim * item
    return Case(
        make=lambda key: (size.asked(key), size.held(key), size.asked_at(), size.held_at()),
        call=function,
        bytes=rows * (size.heads * size.asking + size.kv_heads * size.tokens)
        + 8.0 * size.batch * size.kv_heads * size.tokens,
        flops=2.0 * size.pairs * size.head_dim,
    )


def column_attention(function: Callable[..., Any], size: Size) -> Case:
    def make(key: jax.Array) -> tuple[Any, ...]:
        places = size.asked_at().astype(jnp.float32)
        lse = jnp.broadcast_to(jnp.log(places + 1)[:, None], (size.batch, size.heads, size.asking))
        return size.asked(key), lse + 0.5, size.held(key), size.asked_at(), size.held_at()

    columns = size.batch * size.heads * size.tokens
    return Case(
        make=make,
        call=function,
        bytes=_touched(size, size.asking, size.tokens, columns) / 2 + 4.0 * columns,
        flops=2.0 * size.pairs * size.head_dim,
    )


def pooled_max(function: Callable[..., Any], shape: Any) -> Case:
    from kernels_pallas.pooled_max.pairs import Rule, Tensors, chosen_scores

    size = Size(
        tokens=shape.length, queries=shape.queries or 0, batch=shape.batch, heads=shape.heads
    )
    options = {"scale": shape.scale, "activation": shape.activation, "reduce": shape.reduce}
    specs = {name: spec for name, spec in shape.specs().items() if spec is not None}

    def make(key: jax.Array) -> tuple[Any, ...]:
        drawn = {
            name: jax.random.normal(jax.random.fold_in(key, index), spec.shape, spec.dtype)
            for index, (name, spec) in enumerate(specs.items())
            if spec.dtype != jnp.int32
        }
        drawn |= {"query_positions": size.asked_at(), "key_positions": size.held_at()[:, 0]}
        return tuple(drawn[name] for name in specs)

    def call(*arguments: Any, implementation: str | None) -> Any:
        named = dict(zip(specs, arguments, strict=True))
        return function(**named, **options, implementation=implementation)

    def agree(arguments: tuple[Any, ...], found: Any, wanted: Any) -> None:
        """Close values; and queries that are as good, where sums differ in their last bits."""
        close(found[0], wanted[0])
        named = dict(zip(specs, arguments, strict=True))
        tensors = Tensors(*(named.get(n) for n in ("queries", "keys", "weights", "offsets")))
        close(chosen_scores(Rule(**options), tensors, found[1]), found[0])

    return Case(
        make=make,
        call=call,
        bytes=float(sum(spec.size * spec.dtype.itemsize for spec in specs.values()))
        + 8.0 * shape.batch * shape.length,
        flops=2.0 * size.pairs * shape.size,
        agree=agree,
    )


def compact(function: Callable[..., Any], size: Size) -> Case:
    """The slots that stay are spread evenly."""
    heads = (size.batch, size.kv_heads)

    def make(key: jax.Array) -> tuple[Any, ...]:
        step = size.tokens / size.kept
        places = (jnp.arange(size.kept, dtype=jnp.float32) * step).astype(jnp.int32)
        indices = jnp.broadcast_to(places, (1, *heads, size.kept))
        keys = size.held(key)[None]
        return (keys, keys + 1), indices, jnp.full((1, *heads), size.kept, jnp.int32)

    row = 2.0 * math.prod(heads) * size.head_dim * jnp.dtype(size.dtype).itemsize
    return Case(
        make=make,
        call=lambda arrays, *rest, implementation: function(
            arrays, *rest, implementation=implementation
        ),
        bytes=row * (2 * size.kept + max(size.tokens - size.kept, 0)),
        flops=0.0,
        replaces=True,
    )


def decode_attention(function: Callable[..., Any], size: Size) -> Case:
    """Heads of a padded cache are 1/4 to full, as uneven budgets leave them."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        return (
            size.asked(key),
            size.held(key),
            size.held(jax.random.fold_in(key, 1)),
            jnp.full((size.batch, size.asking), size.tokens, jnp.int32),
            size.held_at(),
            _uneven(size),
        )

    slots = size.tokens * 5 // 8
    return Case(
        make=make,
        call=function,
        bytes=_touched(size, size.asking, slots, size.batch * size.heads * size.asking),
        flops=4.0 * size.batch * size.heads * size.asking * slots * size.head_dim,
    )


def paged_attention(function: Callable[..., Any], size: Size) -> Case:
    pages = -(-size.tokens // size.page)
    size = dataclasses.replace(size, tokens=pages * size.page)
    shape = (size.batch, size.kv_heads * pages, size.page, size.head_dim)
    dense = decode_attention(function, size)

    def make(key: jax.Array) -> tuple[Any, ...]:
        table = jax.random.permutation(key, shape[1]).reshape(1, size.kv_heads, pages)
        table = jnp.broadcast_to(table.astype(jnp.int32), (size.batch, size.kv_heads, pages))
        queries, _, _, at, places, lengths = dense.make(key)
        positions = jnp.zeros(shape[:3], jnp.int32)
        row = jnp.arange(size.batch)[:, None, None]
        positions = positions.at[row, table].set(places.reshape(*table.shape, size.page))
        keys = size.normal(key, *shape)
        values = size.normal(jax.random.fold_in(key, 1), *shape)
        return queries, keys, values, positions, table, lengths, at

    return dataclasses.replace(dense, make=make, call=function)


def decode_mass(function: Callable[..., Any], size: Size) -> Case:
    dense = decode_attention(function, size)

    def make(key: jax.Array) -> tuple[Any, ...]:
        others = jnp.zeros((size.batch, size.heads, size.asking), jnp.float32)
        return *dense.make(key), others

    mass = 4.0 * size.batch * size.heads * size.tokens
    return dataclasses.replace(dense, make=make, call=function, bytes=dense.bytes + mass)


def paged_mass(function: Callable[..., Any], size: Size) -> Case:
    paged = paged_attention(function, size)

    def make(key: jax.Array) -> tuple[Any, ...]:
        others = jnp.zeros((size.batch, size.heads, size.asking), jnp.float32)
        return *paged.make(key), others

    mass = 4.0 * size.batch * size.heads * size.tokens
    return dataclasses.replace(paged, make=make, bytes=paged.bytes + mass)


def segment_attention(function: Callable[..., Any], size: Size) -> Case:
    """Two documents in a row."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        values = size.held(jax.random.fold_in(key, 1))
        segments = (size.asked_at() >= size.tokens // 3).astype(jnp.int32)
        return size.asked(key), size.held(key), values, segments

    return dataclasses.replace(retention_attention(function, size), make=make)


def compact_pages(function: Callable[..., Any], size: Size) -> Case:
    """As `compact`, in pools whose pages lie in any order."""
    pages = -(-size.tokens // size.page)
    dense = compact(function, dataclasses.replace(size, tokens=pages * size.page))

    def make(key: jax.Array) -> tuple[Any, ...]:
        total = size.kv_heads * pages
        pool = size.normal(key, size.batch, total, size.page, size.head_dim)
        table = jax.random.permutation(key, total).astype(jnp.int32)
        table = jnp.broadcast_to(
            table.reshape(size.kv_heads, pages), (1, size.batch, size.kv_heads, pages)
        )
        return (pool, pool + 1), *dense.make(key)[1:], table

    def call(arrays: Any, *rest: Any, implementation: str | None) -> Any:
        *places, table = rest
        return function(arrays, *places, table=table, implementation=implementation)

    return dataclasses.replace(dense, make=make, call=call)


def retention_attention(function: Callable[..., Any], size: Size) -> Case:
    def make(key: jax.Array) -> tuple[Any, ...]:
        shape = (size.batch, size.kv_heads, size.tokens)
        log_beta = -jax.random.uniform(key, shape, jnp.float32) / 64
        values = size.held(jax.random.fold_in(key, 1))
        segments = jnp.zeros((size.batch, size.tokens), jnp.int32)
        return size.asked(key), size.held(key), values, log_beta, segments

    return Case(
        make=make,
        call=function,
        bytes=_touched(size, size.tokens, size.tokens, size.batch * size.kv_heads * size.tokens),
        flops=4.0 * size.pairs * size.head_dim,
    )


def retention_gradient(function: Callable[..., Any], size: Size) -> Case:
    """Forward and backward pass: seven products of a pair's numbers where the forward has two."""
    forward = retention_attention(function, size)

    def call(*arguments: Any, implementation: str | None) -> Any:
        *inputs, segments = arguments

        def total(inputs: list[Any]) -> jax.Array:
            out = function(*inputs, segments, implementation=implementation)
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        return jax.grad(total)(list(inputs))

    def agree(_: tuple[Any, ...], found: Any, wanted: Any) -> None:
        close_in_units_of_largest(found, wanted)

    bytes_, flops = 3 * forward.bytes, 3.5 * forward.flops
    return dataclasses.replace(forward, call=call, bytes=bytes_, flops=flops, agree=agree)


def memory_update(function: Callable[..., Any], size: Size) -> Case:
    """IndexMem's state of M features after half of the entries are written to it."""
    features, width = 4 * size.head_dim, size.kv_heads * size.head_dim

    def make(key: jax.Array) -> tuple[Any, ...]:
        weights = jax.random.normal(key, (size.kv_heads, size.head_dim, features), jnp.float32)
        return (
            weights * jnp.float32(width**-0.5),
            jnp.zeros((size.batch, features, width), jnp.float32),
            jnp.zeros((size.batch, features), jnp.float32),
            size.held(key),
            size.held(jax.random.fold_in(key, 1)),
            size.held_at(),
            size.held_at() % 2 == 0,
            jnp.ones(size.batch, jnp.float32),
        )

    item = jnp.dtype(size.dtype).itemsize
    return Case(
        make=make,
        call=function,
        bytes=size.batch * width * (2.0 * size.tokens * item + 8.0 * features)
        + 4.0 * width * features,
        flops=4.0 * size.batch * size.tokens * width * features / 2,
    )


def removal_error(function: Callable[..., Any], size: Size) -> Case:
    """ReST-KV's joint change of a group's output; the factor of W_O is lower triangular."""
    group = size.heads // size.kv_heads
    wide = group * size.head_dim

    def make(key: jax.Array) -> tuple[Any, ...]:
        logits = jax.random.normal(key, (size.batch, size.kv_heads, group, size.tokens))
        factor = jnp.tril(jax.random.normal(key, (size.kv_heads, wide, wide), jnp.float32))
        return (
            jax.nn.softmax(logits.astype(jnp.float32)),
            size.held(key),
            size.held_at(),
            jnp.full(size.batch, size.tokens, jnp.int32),
            factor * jnp.float32(wide**-0.5),
        )

    def call(*arguments: Any, implementation: str | None) -> Any:
        return function(*arguments, joint=True, implementation=implementation)

    def agree(_: tuple[Any, ...], found: Any, wanted: Any) -> None:
        close(found * size.tokens, wanted * size.tokens)  # errors are of the order of a weight

    rows = size.batch * size.kv_heads
    item = jnp.dtype(size.dtype).itemsize
    return Case(
        make=make,
        call=call,
        agree=agree,
        bytes=rows * size.tokens * (4.0 * group + item * size.head_dim + 4)
        + 4.0 * size.kv_heads * wide**2,
        flops=rows * size.tokens * float(wide) ** 2,
    )


def occupancy(function: Callable[..., Any], size: Size) -> Case:
    """An exponential, a product and a sum per pair; no matrix product."""

    def make(key: jax.Array) -> tuple[Any, ...]:
        shape = (size.batch, size.kv_heads, size.tokens)
        log_beta = -jax.random.uniform(key, shape, jnp.float32) / 64
        return log_beta, jnp.zeros((size.batch, size.tokens), jnp.int32)

    return Case(
        make=make,
        call=function,
        bytes=8.0 * size.batch * size.kv_heads * size.tokens,
        flops=3.0 * size.pairs * size.kv_heads / size.heads,
    )


def select(function: Callable[..., Any], size: Size) -> Case:
    def make(key: jax.Array) -> tuple[Any, ...]:
        shape = (size.batch, size.kv_heads, size.tokens)
        # Scores of few values tie, as those of bfloat16 models do.
        scores = jnp.round(jax.random.normal(key, shape, jnp.float32) * 64) / 64
        rank = (size.held_at() < 4).astype(jnp.int32)
        return scores, rank, size.held_at() >= 0, jnp.full(shape[:2], size.kept, jnp.int32)

    return Case(
        make=make,
        call=function,
        bytes=10.0 * size.batch * size.kv_heads * size.tokens,
        flops=0.0,
    )


def _uneven(size: Size) -> jax.Array:
    """Lengths of a quarter to all of the slots, 5/8 on average."""
    steps = max(size.kv_heads - 1, 1)
    lengths = [
        max(size.tokens * (steps + 3 * head) // (4 * steps), 1) for head in range(size.kv_heads)
    ]
    return jnp.broadcast_to(jnp.asarray(lengths, jnp.int32), (size.batch, size.kv_heads))
