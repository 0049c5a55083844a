"""The axes of what is selected, for programs over several devices."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.partition import leading


def axes(
    scores: Float[Array, "*n S"],
    rank: Int[Array, "*n S"],
    valid: Bool[Array, "*n S"],
    budgets: Int[Array, "*n"],
) -> str:
    """Of `keep_mask`: rows are selected from apart from each other."""
    del scores, rank, valid
    lead = leading(budgets.ndim)
    return f"{lead} S, {lead} S, {lead} S, {lead} -> {lead} S"
