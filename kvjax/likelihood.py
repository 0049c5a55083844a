"""How likely a continuation is, given a cache: what perplexity after eviction is made of."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from kvjax import remembering
from kvjax.cache import Cache
from kvjax.checks import check_cache, check_ids
from kvjax.layer_steps import attend, prompt_positions
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy

_BLOCK = 128  # positions whose logits exist at a time


def log_likelihood(
    model: Decoder,
    cache: Cache,
    logits: Float[Array, "B V"],
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"] | None = None,
    *,
    policy: Policy | None = None,
    params: Any = None,
) -> Float32[Array, "B T"]:
    """log p of every token of a continuation, in nats; 0 in the padding behind `lengths`.

    `cache` and `logits` are what prefill, compress or extend returned for what comes before. The
    tokens attend to the cache as it stands and to each other; nothing is evicted or changed. A
    cache that carries a memory is read with the `policy` that wrote it and its `params`; others
    need neither. Perplexity is exp of minus the mean.

    Raises:
      ValueError: a cache of another model or without the policy it needs, or ids outside the
        vocabulary.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    full = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
    lengths = full if lengths is None else jnp.asarray(lengths, jnp.int32)
    check_cache(model, cache)
    check_ids(model, tokens)
    if policy is not None and not policy.remembers:
        policy, params = None, None
    return _log_likelihood(model, cache, logits, tokens, lengths, policy, params)


@partial(jax.jit, static_argnames="policy")
def _log_likelihood(
    model: Decoder,
    cache: Cache,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    policy: Policy | None,
    params: Any,
) -> Float32[Array, "B T"]:
    x = residual_stream(model, cache, tokens, lengths, policy, params)
    first = _chosen(logits, tokens[:, 0])[:, None]
    found = jnp.concatenate([first, _following(model, x, tokens)], axis=1)
    return jnp.where(prompt_positions(tokens, lengths) >= 0, found, 0.0)


def residual_stream(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    policy: Policy | None = None,
    params: Any = None,
) -> Float[Array, "B T E"]:
    """The last residual stream of a continuation, whose tokens are not put into the cache.

    Pure, and differentiable with respect to the cache's keys and values.
    """
    remembered = remembering.memory_of(cache, policy, params, model.config)
    place = prompt_positions(tokens, lengths)
    positions = jnp.where(place >= 0, cache.next_position[:, None] + place, -1)
    rotation = model.rotation(positions)

    def body(x: Array, inputs: Any) -> tuple[Array, None]:
        layer, window, view, *remembered = inputs
        cached, read = (cache, view), remembering.reader(policy, *remembered)
        return attend(layer, x, rotation, positions, window, frozenset(), cached, read)[0], None

    inputs = (model.layers, jnp.asarray(model.windows), cache.views, *remembered)
    return lax.scan(body, model.embed(tokens), inputs)[0]


def _following(
    model: Decoder, x: Float[Array, "B T E"], tokens: Int[Array, "B T"]
) -> Float32[Array, "B T-1"]:
    """log p of tokens 1 to T - 1 from the residual stream of those before, block by block."""
    columns = (jnp.swapaxes(x[:, :-1], 0, 1), tokens[:, 1:].T)
    found = lax.map(lambda one: _chosen(model.logits(one[0]), one[1]), columns, batch_size=_BLOCK)
    return found.T


def _chosen(logits: Float[Array, "*n V"], tokens: Int[Array, "*n"]) -> Float32[Array, "*n"]:
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]
