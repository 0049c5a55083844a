"""A prompt whose tokens lie over the mesh axis `sequence`: who holds what, and how it attends.

A device holds the hidden states, queries and MLP of its own T / n tokens. In each layer it gathers
the keys and values of all of them, which grouped-query attention makes the small part, and lets
go of them behind attention: what a policy then sees is spread over tokens again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas.attention import attention, library, merge
from kernels_pallas.attention.api import PROMPT, portable_form
from kernels_pallas.column_attention import column_attention
from kvjax.models.decoder import Projected
from kvjax.placement import RULES

AXIS = "sequence"
_LANES = 128


def divides(mesh: AbstractMesh | None) -> bool:
    """Whether tokens lie over several devices of this mesh."""
    return mesh is not None and mesh.shape.get(AXIS, 1) > 1


def padded(tokens: Shaped[Array, "B T"] | None, mesh: AbstractMesh | None) -> Any:
    """`tokens` with as many zeros behind them as let every device have two equal chunks."""
    if tokens is None or mesh is None or not divides(mesh):
        return tokens
    pieces, length = 2 * mesh.shape[AXIS], tokens.shape[1]
    chunk = -(-length // pieces)
    if chunk > 8 * _LANES:  # as kernels take them, where that adds an eighth at most
        chunk += -chunk % _LANES
    return jnp.pad(tokens, ((0, 0), (0, pieces * chunk - length)))


def spread_attention(
    new: Projected,
    positions: Int[Array, "B T"],
    window: Int[Array, ""],
    mesh: AbstractMesh,
    *,
    windowed: bool,
    column: bool,
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"], Float[Array, "B H T"] | None]:
    """A prompt's attention to itself: output, log-sum-exp and, asked for, its column sums.

    All are spread over tokens as the queries are. `windowed` says that a layer of the model has a
    sliding window.
    """

    def attend(asking: Any, held: Any, whole: Any) -> Any:
        (queries, own), (keys, values), (positions, window) = asking, held, whole
        slots = jnp.broadcast_to(positions[:, None], keys.shape[:3])

        def plain(form: Any = None) -> Any:
            return attention(queries, keys, values, own, slots, window, implementation=form)

        def run(chosen: str) -> Any:
            if chosen not in library.KERNELS.values():
                return plain(chosen)
            return _by_kernel(library.named(chosen), queries, keys, values, mesh.shape[AXIS])

        if windowed:
            out, lse = plain()
        else:
            portable = portable_form(queries, keys)
            out, lse = PROMPT.choose(run, implementation=None, portable=portable)
        if not column:
            return (out, lse), None
        sums = column_attention(queries, lse, keys, own, slots, window)
        return (out, lse), lax.psum_scatter(sums, AXIS, scatter_dimension=2, tiled=True)

    asking, held = (new.queries, positions), (new.keys, new.values)
    (out, lse), sums = over_tokens(attend, asking, held, (positions, window), mesh)
    return out, lse, sums


def over_tokens(
    attend: Callable[[Any, Any, Any], Any], asking: Any, held: Any, whole: Any, mesh: AbstractMesh
) -> Any:
    """`attend(asking, held, whole)` on each device, for its share of the tokens.

    `asking` are arrays [B, H, T, ...] or [B, T] of the tokens that attend, `held` arrays
    [B, K, T, ...] of those that are attended to, gathered here, and `whole` what every device has
    all of: [B, T], or a scalar. Returns what `attend` does, a pair of arrays [B, N, T, ...]: those
    of the asking tokens, which go back to where these came from, and others, which stay.

    Of T tokens in order the last device would see up to twice the mean. Therefore the sequence
    is cut into 2 n chunks, and the asking tokens are dealt anew: chunk g to device g or, from the
    other end, 2 n - 1 - g, so that each sees 2 n - 1 chunks and the halves of two.
    """
    count, length = mesh.shape[AXIS], held[0].shape[2]
    if length % (2 * count):
        raise ValueError(
            f"{length} tokens over {count} devices: allowed are multiples of {2 * count}, two "
            "chunks for each"
        )
    heads = RULES.spec(("batch", "kv_heads", "tokens"), held[0].shape[:3], mesh)

    def spec(array: Any) -> PartitionSpec:
        return heads if array.ndim > 2 else PartitionSpec(heads[0], heads[2])

    def local(asking: Any, held: Any, whole: Any) -> Any:
        asking = jax.tree.map(lambda a: _dealt(a, count), asking)
        held = jax.tree.map(lambda a: lax.all_gather(a, AXIS, axis=2, tiled=True), held)
        found, others = attend(asking, held, whole)
        return jax.tree.map(lambda a: _dealt(a, count, back=True), found), others

    everywhere = jax.tree.map(
        lambda a: PartitionSpec(heads[0]) if a.ndim else PartitionSpec(), whole
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.tree.map(spec, asking), jax.tree.map(spec, held), everywhere),
        out_specs=heads,
        check_vma=False,
    )(asking, held, whole)


def _by_kernel(
    kernel: Callable[..., tuple[Array, Array]],
    queries: Array,
    keys: Array,
    values: Array,
    count: int,
) -> tuple[Array, Array]:
    """Both chunks of this device, each against itself and then against every chunk before it."""
    size = queries.shape[2] // 2

    def chunk(array: Array, index: Array) -> Array:
        return lax.dynamic_slice_in_dim(array, index * size, size, axis=2)

    def one(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        q, here = inputs
        out, lse = kernel(q, chunk(keys, here), chunk(values, here))

        def earlier(index: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
            entries = chunk(keys, index), chunk(values, index)
            return merge(found, kernel(q, *entries, causal=False))

        # Between the merges in float32, so that their number costs no precision.
        return lax.fori_loop(0, here, earlier, (out.astype(jnp.float32), lse))

    halves = jnp.stack([queries[:, :, :size], queries[:, :, size:]])
    out, lse = lax.map(one, (halves, _chunks_of(lax.axis_index(AXIS), count)))
    out = out.astype(queries.dtype)
    return jnp.concatenate([*out], axis=2), jnp.concatenate([*lse], axis=2)


def _chunks_of(device: Int[Array, ""], count: int) -> Int[Array, "2"]:
    """The even and the odd chunk that a device attends with: its own index and its mirror's."""
    pair = jnp.stack([device, 2 * count - 1 - device])
    return jnp.where(device % 2 == 0, pair, pair[::-1])


def _dealt(array: Array, count: int, *, back: bool = False) -> Array:
    """Chunks 2 d, 2 d + 1 of device d exchanged for the even and odd one of d and its mirror.

    `back` undoes it. Every device sends one even and one odd chunk and receives one of each.
    """
    axis = min(2, array.ndim - 1)
    size = array.shape[axis] // 2
    halves = []
    for parity in (0, 1):
        half = lax.slice_in_dim(array, parity * size, (parity + 1) * size, axis=axis)
        moves = []
        for device in range(count):
            chunk = 2 * device + parity
            moves.append((device, min(chunk, 2 * count - 1 - chunk)))
        if back:
            moves = [(there, here) for here, there in moves]
        halves.append(lax.ppermute(half, AXIS, moves))
    return jnp.concatenate(halves, axis=axis)
