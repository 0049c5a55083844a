"""The axes of what is compacted, for programs over several devices."""

from __future__ import annotations

from jaxtyping import Array, Int

from kernels_pallas.partition import leading


def axes(
    arrays: tuple[Array, ...],
    indices: Int[Array, "*n C"],
    lengths: Int[Array, "*n"],
    held: Int[Array, "*n"],
    table: Int[Array, "*n M"] | None = None,
) -> str:
    """Of `compact`: heads are moved apart from each other, but the heads of a row share a pool."""
    del indices, held
    lead = leading(lengths.ndim)
    kind = f"{lead} S" if table is None else "B pages P"
    moved = ", ".join(f"{kind} width{at}" for at in range(len(arrays)))
    return f"{moved}, {lead} C, {lead}, {lead}, {lead} M -> {moved}"
