"""Rows of tokens as callers have them, as the padded arrays that compiled functions take."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.checks import check_integers, check_modalities

type Tokens = Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]] | Sequence[int]
type Lengths = Int[Array | np.ndarray, " B"] | Sequence[int] | None


def as_batch(tokens: Tokens, lengths: Lengths) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Right-padded tokens and the length of each row.

    Raises:
      ValueError: an empty row, values that are not integers, or lengths that do not belong.
    """
    if isinstance(tokens, jax.Array | np.ndarray):
        if tokens.ndim != 2:
            raise ValueError(f"tokens of shape {tokens.shape}: allowed is [batch, length]")
        check_integers(tokens)
        if lengths is None:
            lengths = np.full(tokens.shape[0], tokens.shape[1])
        if not isinstance(lengths, jax.Array):
            lengths = np.asarray(lengths)
        check_integers(lengths, "lengths")
        if lengths.shape != tokens.shape[:1]:
            raise ValueError(
                f"lengths of shape {lengths.shape}: allowed is one for each of "
                f"{tokens.shape[0]} rows"
            )
        return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    if lengths is not None:
        raise ValueError("lengths go with an array of tokens; lists have their own")
    rows = [list(row) if isinstance(row, Sequence) else [row] for row in tokens]
    if tokens and not isinstance(tokens[0], Sequence):
        rows = [[row[0] for row in rows]]
    if not rows or any(not row for row in rows):
        raise ValueError("empty prompt: every row needs at least one token")
    counts = [len(row) for row in rows]
    padded = np.zeros((len(rows), max(counts)), np.int32)
    for index, row in enumerate(rows):
        check_integers(np.asarray(row))
        padded[index, : len(row)] = row
    return jnp.asarray(padded), jnp.asarray(counts, jnp.int32)


def as_modalities(
    given: Tokens | None, shape: tuple[int, ...], lengths: Int[Array, " B"]
) -> Int[Array, "B T"] | None:
    """An id for each token of a batch of this shape; lists are as long as their rows."""
    if given is None:
        return None
    if isinstance(given, jax.Array | np.ndarray):
        if given.shape != shape:
            raise ValueError(f"modalities of shape {given.shape}: allowed is {shape}, as tokens")
        check_modalities(given)
        return jnp.asarray(given, jnp.int8)
    lists = given if given and isinstance(given[0], Sequence) else [given]
    rows = [np.asarray(row) for row in lists]
    counts = [row.size for row in rows]
    wanted = counts if isinstance(lengths, jax.core.Tracer) else np.asarray(lengths).tolist()
    if counts != wanted or len(counts) != shape[0] or max(counts) > shape[1]:
        raise ValueError(f"modalities of {counts} ids: allowed are {wanted}, one for each token")
    padded = np.zeros(shape, np.int8)
    for index, row in enumerate(rows):
        check_modalities(row)
        padded[index, : row.size] = row
    return jnp.asarray(padded)
