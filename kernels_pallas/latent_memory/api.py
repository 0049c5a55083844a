"""Dispatch of a latent memory's write and read.

The read is not part of decode attention: its features are of all heads of a token together, and
it reads M and the weights of phi (4 M (K D + N D) bytes a layer), of which attention reads nothing.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Bool, Float, Float32, Int

from kernels_pallas import dispatch

_READ = dispatch.Operation("memory_read", "kernels_pallas.latent_memory", ("reference",))
_UPDATE = dispatch.Operation(
    "memory_update", "kernels_pallas.latent_memory", ("reference", "blockwise")
)


def memory_update(
    weights: Float[Array, "K D M"],
    values_state: Float32[Array, "B *n"],
    squares_state: Float32[Array, "B *m"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    evicted: Bool[Array, "B K S"],
    kept: Float32[Array, " B"],
    *,
    eta: float = 1.0,
    normalise: bool = True,
    aligned: bool = False,
    implementation: Literal["reference", "blockwise"] | None = None,
) -> tuple[Float32[Array, "B *n"], Float32[Array, "B *m"]]:
    """A memory's M and b, in float32, after the marked entries are written to it.

    M is [B, M, K D] with b [B, M] for a memory that all heads share, [B, K, M, D] with [B, K, M]
    for one per head; `kept` is what is left of them before, 1 for a row that is not to decay. See
    the reference for the equations, for tokens whose heads evict them apart, and for `aligned`.
    `implementation` None is "blockwise" on TPU and GPU, whose scratch does not grow with S.
    """
    large = dispatch.platform() in dispatch.KERNELS
    return _UPDATE(
        weights, values_state, squares_state, keys, values, positions, evicted, kept,
        eta=eta, normalise=normalise, aligned=aligned,
        implementation=implementation, portable="blockwise" if large else "reference",
    )  # fmt: skip


def memory_read(
    weights: Float[Array, "N D M"],
    values_state: Float32[Array, "B *n"],
    squares_state: Float32[Array, "B *m"],
    queries: Float[Array, "B H T D"],
    *,
    eps: float = 1e-6,
    normalise: bool = True,
) -> tuple[Float32[Array, "B H T D"], Float32[Array, "B H T"]]:
    """m of every query, exactly 0 from an empty memory, and its mass (phi * phi)^T b / M."""
    read: tuple[Array, Array] = _READ(
        weights, values_state, squares_state, queries, eps=eps, normalise=normalise,
        implementation=None, portable="reference",
    )  # fmt: skip
    return read
