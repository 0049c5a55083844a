"""Dispatch of compaction, and whether it has a kernel here."""

from __future__ import annotations

import importlib
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels_pallas import dispatch

type CompactImplementation = Literal["reference", "mosaic_tpu", "mosaic_gpu"]

_COMPACT = dispatch.Operation(
    "compact", "kernels_pallas.gather_compact", ("reference", "mosaic_tpu", "mosaic_gpu")
)


def compact(
    arrays: tuple[Array, ...],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    *,
    held: Int[Array, "*n"] | None = None,
    table: Int[Array, "*n M"] | None = None,
    implementation: CompactImplementation | None = None,
) -> tuple[Array, ...]:
    """Moves each head's kept slots to its front, in place where the arrays are donated.

    `arrays` are [*n, S, D]; or pools of pages [B, N, P, D] with `table` [L, B, K, M], in which
    slot s of a head is slot s % P of page `table[l, b, k, s // P]`. The first `lengths` of
    `indices` ascend; the others are not read. Slots from there to `held`, the slots in use
    before (default: all), are set to 0; those behind it are set to 0 or left, so of a cache,
    which holds zeros there, every implementation makes the same.
    """
    if held is None:
        if table is None:
            held = jnp.full(lengths.shape, arrays[0].shape[indices.ndim - 1], jnp.int32)
        else:
            held = jnp.sum(table >= 0, axis=-1, dtype=jnp.int32) * arrays[0].shape[2]
    return _COMPACT(
        arrays, indices, lengths, held, table, implementation=implementation, portable="reference"
    )


def in_place(arrays: tuple[Array, ...], table: Int[Array, "*n M"] | None = None) -> bool:
    """Whether `compact` of these moves kept entries within the arrays, as the kernels do.

    Elsewhere, and where a kernel declines them, all that is kept is gathered beside them.
    """

    def moves(implementation: str) -> bool:
        if implementation not in dispatch.KERNELS.values():
            return False
        kernel = importlib.import_module(f"{_COMPACT.package}.pallas_{implementation}")
        kernel.decline(arrays, table)
        return True

    found: bool = _COMPACT.choose(moves, implementation=None, portable="reference")
    return found
