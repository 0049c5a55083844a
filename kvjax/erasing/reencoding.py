"""Some tokens of a context once more, over the cached entries of the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache import Cache, edits
from kvjax.layer_steps import attend
from kvjax.models.decoder import Adapters, Decoder

type Entries = tuple[Float[Array, "l B K M D"], Float[Array, "l B K M D"]]


def reencode(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B M"],
    positions: Int[Array, "B M"],
    *,
    reads: int | None = None,
    layers: int | None = None,
    adapters: Adapters | None = None,
) -> Entries:
    """Keys and values of tokens that the cache has seen, computed again.

    They attend to the cached entries before them at other positions, head by head as far as those
    are still there, and causally to each other.

    Args:
      tokens, positions: what to compute; ascending, with position -1 for padding behind.
      reads: slots of each head that are looked at, from the front; all that is visible has to be
        among them. Default all.
      layers: how many layers to run, from the bottom; default all.
      adapters: low-rank additions to the projections, stacked over layers.
    """
    seen = edits.hide(cache if reads is None else edits.leading(cache, reads), positions)
    rotation = model.rotation(positions)
    stack = (model.layers, jnp.asarray(model.windows), seen.views, adapters)
    if layers is not None:
        stack = jax.tree.map(lambda array: array[:layers], stack)

    def body(x: Array, inputs: Any) -> tuple[Array, tuple[Array, Array]]:
        layer, window, view, own = inputs
        x, new, _ = attend(
            layer, x, rotation, positions, window, frozenset(), (seen, view), adapters=own
        )
        return x, (new.keys, new.values)

    return lax.scan(body, model.embed(tokens), stack)[1]
