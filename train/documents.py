"""One document out of every packed row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from train.recipe import Batch


def one_document(batch: Batch, key: Array) -> tuple[dict[str, Array], Int[Array, " B"]]:
    """The document of a random token of every row, moved to the row's front, and its length.

    All arrays of the batch move; what stands behind the document belongs to others.
    """
    segments = batch["segments"]
    chances = jnp.where(segments >= 0, 0.0, -jnp.inf)
    token = jax.random.categorical(key, chances, axis=1)
    chosen = jnp.take_along_axis(segments, token[:, None], axis=1)
    mine = (segments == chosen) & (segments >= 0)
    start = jnp.argmax(mine, axis=1)
    moved = {name: to_front(array, start) for name, array in batch.items()}
    return moved, jnp.sum(mine, axis=1, dtype=jnp.int32)


def to_front(rows: Array, start: Int[Array, " B"]) -> Array:
    """Every row from its `start` on, what stood before it behind."""
    return jax.vmap(lambda row, by: jnp.roll(row, -by))(rows, start)
