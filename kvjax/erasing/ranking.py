"""Which suffix tokens took most from a span, seen from an early layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from kernels_pallas.attention import attention, merge
from kvjax.cache import Cache, edits
from kvjax.erasing.spans import inside
from kvjax.layer_steps import attend
from kvjax.models.decoder import Decoder


def deviation(
    cache: Cache,
    layer: int,
    keys: Float[Array, "B K M D"],
    values: Float[Array, "B K M D"],
    positions: Int[Array, "B M"],
) -> Float32[Array, "B M"]:
    """Squared distance of K and V from the cached ones, summed over the heads that hold a token.

    The KV deviation of CacheBlend (arXiv 2405.16444, section 4).
    """
    old_keys, old_values, held = edits.entries_at(cache, layer, positions)
    total = jnp.zeros(held.shape, jnp.float32)
    for new, old in ((keys, old_keys), (values, old_values)):
        difference = new.astype(jnp.float32) - old.astype(jnp.float32)
        total += jnp.sum(jnp.square(difference), axis=-1)
    return jnp.sum(jnp.where(held, total, 0.0), axis=1)


def attention_to(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B M"],
    positions: Int[Array, "B M"],
    spans: Int[Array, "B N 2"],
    *,
    layer: int,
    reads: int | None = None,
) -> Float32[Array, "B M"]:
    """The share of each token's attention in `layer` that falls on the spans, summed over heads.

    As in the prefill: the tokens, which the cache has seen, run through the layers below over the
    cache as it stands.
    """
    seen = edits.hide(cache if reads is None else edits.leading(cache, reads), positions)
    axis = seen.row_axes.get("positions", 0)
    erased = jnp.where(inside(spans, seen.positions, axis), seen.positions, -1)
    only = dataclasses.replace(seen, positions=erased)
    rotation = model.rotation(positions)
    stack: Any = (model.layers, jnp.asarray(model.windows), seen.views, only.views)

    def body(x: Array, inputs: Any) -> tuple[Array, None]:
        below, window, view, _ = inputs
        return attend(below, x, rotation, positions, window, frozenset(), (seen, view))[0], None

    x, _ = lax.scan(body, model.embed(tokens), jax.tree.map(lambda a: a[:layer], stack))
    here, window, view, spans_view = jax.tree.map(lambda a: a[layer], stack)
    new = here.project(x, *rotation)
    spread = jnp.broadcast_to(positions[:, None], new.keys.shape[:3])
    own = attention(new.queries, new.keys, new.values, positions, spread, window)
    _, everything = merge(seen.attend(view, new.queries, positions, window), own)
    _, on_spans = only.attend(spans_view, new.queries, positions, window)
    shares = jnp.exp(on_spans - jnp.where(jnp.isfinite(everything), everything, 0.0))
    return jnp.sum(shares, axis=1)
