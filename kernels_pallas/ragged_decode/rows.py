"""How kernels see a decode step: a KV head's queries as rows, each row with the range it sees."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to


def query_rows(
    queries: Float[Array, "B H Q D"], num_kv_heads: int, multiple: int
) -> Float[Array, "B K R D"]:
    """The G * Q queries that read one KV head, query fastest, padded to a multiple of rows."""
    batch, _, _, size = queries.shape
    return pad_to(queries.reshape(batch, num_kv_heads, -1, size), multiple, 2)


def row_ranges(
    query_positions: Int[Array, "B Q"], group: int, window: int | Int[Array, ""], multiple: int
) -> tuple[Int[Array, "B R"], Int[Array, "B R"]]:
    """(newest, oldest) of each row: it sees the positions p with oldest < p <= newest.

    That is `visible` in two comparisons: oldest is at least -1, so an empty slot is never seen,
    and padding, a query at -1 or a row that fills up, has the empty range (-1, -1).
    """
    newest = jnp.tile(query_positions, (1, group))
    newest = pad_to(newest, multiple, 1, fill=-1)
    return newest, jnp.maximum(newest - window, -1)


def from_rows(
    out: Float[Array, "B K R D"], lse: Float[Array, "B K R"], like: Float[Array, "B H Q D"]
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """Rows as query heads again, without padding, in the queries' dtype."""
    batch, heads, count, _ = like.shape
    rows = heads // out.shape[1] * count
    lse = lse[:, :, :rows].reshape(batch, heads, count)
    return out[:, :, :rows].reshape(like.shape).astype(like.dtype), lse


def logits_from_rows(
    logits: Float[Array, "B K R W"], lengths: Int[Array, "B K"], num_heads: int, slots: int
) -> Float[Array, "B H Q S"]:
    """Rows' logits as query heads', -inf behind each head's length, where nothing was written."""
    place = jnp.arange(slots, dtype=jnp.int32)[None, None, None]
    logits = jnp.where(place < lengths[:, :, None, None], logits[..., :slots], -jnp.inf)
    return logits.reshape(logits.shape[0], num_heads, -1, slots)
