"""The queries of a window as rows of a matrix, one matrix per KV head: what the kernels take."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.attention.blocks import pad_to


@dataclasses.dataclass(frozen=True)
class Rows:
    """Row g * width + w holds query w of the group's head g; the queries are padded to `width`.

    A row sees the positions oldest <= position <= newest; a row that is padding sees none.
    """

    queries: Float[Array, "BK R D"]
    oldest: Int[Array, "B R"]
    newest: Int[Array, "B R"]
    groups: int
    width: int


def rows_of(
    queries: Float[Array, "B H W D"],
    query_positions: Int[Array, "B W"],
    kv_heads: int,
    window: int | Int[Array, ""] | None,
    *,
    multiple: int,
) -> Rows:
    """The rows of every KV head, each query head's padded to a multiple."""
    batch, heads, _, head_dim = queries.shape
    groups = heads // kv_heads
    queries = pad_to(queries, multiple, 2)
    newest = pad_to(query_positions, multiple, 1, fill=-1)
    width = newest.shape[1]
    oldest = jnp.zeros_like(newest)
    if window is not None:
        oldest = jnp.maximum(newest - window + 1, 0)
    return Rows(
        queries=queries.reshape(batch * kv_heads, groups * width, head_dim),
        oldest=jnp.tile(oldest, (1, groups)),
        newest=jnp.tile(newest, (1, groups)),
        groups=groups,
        width=width,
    )


def score_shares(
    query_positions: Int[Array, "B W"],
    query_weights: Float[Array, "B W"] | None,
    rows: Rows,
    *,
    over_queries: str,
    over_group: str | None,
) -> Float[Array, "B R"]:
    """What each row's weights are multiplied with before sums and maxima are taken."""
    if query_weights is not None:
        share = query_weights.astype(jnp.float32)
    elif over_queries == "mean":
        share = _present_share(query_positions, less=0)
    else:
        share = (query_positions >= 0).astype(jnp.float32)
    if over_group == "mean":
        share = share * (1.0 / rows.groups)
    return _spread(share, rows)


def moment_shares(
    query_positions: Int[Array, "B W"], rows: Rows
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Factors of the rows' weights in their mean, and of squared distances in the variance."""
    return (
        _spread(_present_share(query_positions, less=0), rows),
        _spread(_present_share(query_positions, less=1), rows),
    )


def _present_share(query_positions: Int[Array, "B W"], less: int) -> Float[Array, "B W"]:
    present = (query_positions >= 0).astype(jnp.float32)
    count = jnp.sum(present, axis=1, keepdims=True)
    return present / jnp.maximum(count - less, 1.0)


def _spread(share: Float[Array, "B W"], rows: Rows) -> Float[Array, "B R"]:
    padded = jnp.pad(share, ((0, 0), (0, rows.width - share.shape[1])))
    return jnp.tile(padded, (1, rows.groups))
