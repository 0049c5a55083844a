"""A decoder that stores nothing: every logit of a sequence from a dense mask of who sees whom."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.decoder import Decoder


def dense_logits(model: Decoder, tokens: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence [T]; `visible` [L, K, T, T] says which keys a query sees."""
    return np.asarray(dense(model, jnp.asarray(tokens), jnp.asarray(visible)))


def dense(model: Decoder, tokens: jax.Array, visible: jax.Array) -> jax.Array:
    """The same on arrays, for `jit` and `vmap`.

    Plain matrices, layer by layer, nothing shared with the cached path but the projections.
    """
    config = model.config
    group = config.num_heads // config.num_kv_heads
    cos, sin = model.rotation(jnp.arange(len(tokens))[None])
    x = model.embed(tokens[None])

    def body(x, inputs):
        layer, mask = inputs
        new = layer.project(x, cos, sin)
        keys, values = (jnp.repeat(a, group, axis=1)[0] for a in (new.keys, new.values))
        logits = jnp.einsum("hqd,hsd->hqs", new.queries[0], keys) / np.float32(config.head_dim**0.5)
        logits = jnp.where(jnp.repeat(mask, group, axis=0), logits, -jnp.inf)
        out = jnp.einsum("hqs,hsd->hqd", jax.nn.softmax(logits, axis=-1), values)
        return layer.finish(x, out[None]), None

    x, _ = jax.lax.scan(body, x, (model.layers, visible))
    return model.logits(x[0])


def causal(model: Decoder, length: int) -> np.ndarray:
    """[L, K, T, T]: the mask of ordinary decoding, with each layer's sliding window."""
    place = np.arange(length)
    distance = place[:, None] - place[None]
    masks = [(distance >= 0) & (distance < window) for window in model.windows]
    return np.repeat(np.stack(masks)[:, None], model.config.num_kv_heads, axis=1)


def masked(model: Decoder, length: int, prompt: int, positions: np.ndarray) -> np.ndarray:
    """The mask when, behind a prompt of `prompt` tokens, only `positions` of it stayed.

    `positions` [L, K, S] are the kept positions of one row, -1 where empty.
    """
    mask = causal(model, length)
    for layer in range(mask.shape[0]):
        for head in range(mask.shape[1]):
            kept = positions[layer, head]
            gone = np.setdiff1d(np.arange(prompt), kept[kept >= 0])
            mask[layer, head, prompt:, gone] = False
    return mask
