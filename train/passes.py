"""One pass of a frozen model over packed rows, from which every layer gives something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax import placement
from kvjax.models.decoder import Decoder, Projected
from train.attention import segment_attention
from train.recipe import Batch, Params


class Layer(NamedTuple):
    """What a frozen layer computed."""

    new: Projected
    attention: Float[Array, "B H T D"]  # of each query, before the output projection
    lse: Float[Array, "B H T"]  # log-sum-exp of each query's logits
    window: Array  # sliding window in tokens, `NO_WINDOW` for full attention


def frozen_pass(
    model: Decoder, batch: Batch, visit: Callable[[Layer, Any], Any], own: Any = None
) -> tuple[Float[Array, "B T E"], Any]:
    """The last residual stream, and what `visit` gives for each layer, stacked.

    Documents attend within themselves. `own` are arrays with a leading axis of layers, of which
    `visit` gets its layer's. Only they are differentiated, so what a layer gives of them by
    `differentiated_at_once` leaves nothing of the layer to be kept for a backward pass.
    """
    segments = batch["segments"]
    rotation = model.rotation(jnp.maximum(batch["positions"], 0))
    sliding, mesh = any(model.config.windows), placement.mesh_of(model)

    def body(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, window, mine = inputs
        x = placement.spread(x, mesh)
        new = lax.stop_gradient(layer.project(x, *rotation))
        out, lse = segment_attention(new, segments, window if sliding else None, mesh)
        given = visit(Layer(new, out, lse, window), mine)
        return lax.stop_gradient(layer.finish(x, out)), given

    inputs = (model.layers, jnp.asarray(model.windows), own)
    return lax.scan(body, model.embed(batch["tokens"]), inputs)


def plain_pass(model: Decoder, batch: Batch) -> Float[Array, "B T E"]:
    """The last residual stream of the unchanged model."""
    return frozen_pass(model, batch, lambda layer, own: None)[0]


def differentiated_at_once(
    loss: Callable[[Params], tuple[Float[Array, ""], Any]], params: Params
) -> tuple[Float[Array, ""], Any]:
    """`loss(params)`, a number and more, whose gradient is computed now and kept in its stead.

    A backward pass then needs as much memory as `params`, and not what `loss` went through. For
    losses of which nothing but `params` is differentiated; what is beside the number is not.
    """
    (value, more), gradient = jax.value_and_grad(loss, has_aux=True)(lax.stop_gradient(params))
    return _known(params, value, gradient), lax.stop_gradient(more)


@jax.custom_vjp
def _known(params: Params, value: Float[Array, ""], gradient: Params) -> Float[Array, ""]:
    return value


def _known_forward(params: Params, value: Array, gradient: Params) -> tuple[Array, Params]:
    return value, gradient


def _known_backward(gradient: Params, cotangent: Array) -> tuple[Params, None, None]:
    return jax.tree.map(lambda g: cotangent * g, gradient), None, None


_known.defvjp(_known_forward, _known_backward)
