"""Losses over the vocabulary, computed in blocks of positions so that no [T, V] array exists."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvjax import placement, sequence_parallel
from kvjax.models.decoder import Decoder


class TokenLosses(NamedTuple):
    """Sums over the labelled positions, and how many there are."""

    cross_entropy: Float[Array, ""]
    divergence: Float[Array, ""]  # forward KL, teacher to student; 0 without a teacher
    count: Float[Array, ""]

    @property
    def means(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Mean cross-entropy and divergence per labelled position, in nats."""
        count = jnp.maximum(self.count, 1.0)
        return self.cross_entropy / count, self.divergence / count


def token_losses(
    model: Decoder,
    student: Float[Array, "B T E"],
    teacher: Float[Array, "B T E"] | None,
    tokens: Int[Array, "B T"],
    labels: Bool[Array, "B T"],
    block: int = 128,
) -> TokenLosses:
    """Next-token cross-entropy, and sum_v p_teacher (log p_teacher - log p_student), T = 1.

    `student` and `teacher` are residual streams before the final norm. labels[t] says that token
    t + 1 is to be predicted from t. Logits of `block` positions exist at a time, those of blocks
    without a label never; the backward pass computes them again. Where tokens lie over devices, a
    block has as many of each.
    """
    batch, length, width = student.shape
    following = jnp.roll(tokens, -1, axis=1)
    mesh = placement.mesh_of(model)
    shares = 1 if mesh is None else mesh.shape.get(sequence_parallel.AXIS, 1)
    each = -(-block // shares)
    count = -(-length // (shares * each))
    padding = count * shares * each - length

    def split(array: Array) -> Array:
        wide = jnp.pad(array, ((0, 0), (0, padding), *(((0, 0),) * (array.ndim - 2))))
        parts = wide.reshape(batch, shares, count, each, *array.shape[2:])
        return jnp.moveaxis(parts, 2, 0).reshape(count, batch, shares * each, *array.shape[2:])

    teacher = None if teacher is None else split(lax.stop_gradient(teacher))

    zero = jnp.zeros((), jnp.float32)
    head = placement.fetched_head(model, mesh)

    def counted_part(x: Array, reference: Array | None, targets: Array, weight: Array) -> Any:
        log_p = jax.nn.log_softmax(model.logits(x, head), axis=-1)
        chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        divergence = jnp.zeros((), jnp.float32)
        if reference is not None:
            log_q = jax.nn.log_softmax(model.logits(reference, head), axis=-1)
            apart = jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
            divergence = jnp.sum(apart * weight)
        return -jnp.sum(chosen * weight), divergence

    @jax.checkpoint
    def part(
        total: TokenLosses, inputs: tuple[Array, Array | None, Array, Array]
    ) -> tuple[TokenLosses, None]:
        x, reference, targets, counted = inputs
        weight = counted.astype(jnp.float32)
        # Where only answers are labelled most blocks hold no label, and cost nothing.
        cross_entropy, divergence = lax.cond(
            jnp.any(counted), counted_part, lambda *_: (zero, zero), x, reference, targets, weight
        )
        return TokenLosses(
            total.cross_entropy + cross_entropy,
            total.divergence + divergence,
            total.count + jnp.sum(weight),
        ), None

    del width
    inputs = (split(student), teacher, split(following), split(labels))
    return lax.scan(part, TokenLosses(zero, zero, zero), inputs)[0]
