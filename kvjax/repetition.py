"""Replay of a context for KVzip: which entries does the model look at while it repeats it?"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.attention import attention, merge
from kvjax.cache import PaddedCache
from kvjax.models.decoder import Decoder
from kvjax.policies.kvzip import OVERLAP, REPEAT_FIRST, REPEAT_LATER, kvzip_chunk_scores
from kvjax.turns import ChatTokenizer

_MARK = "KVJAXREPEAT"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayPrompt:
    """Token ids fed before a chunk: `first`, or `later` + end of the previous chunk + `suffix`."""

    first: tuple[int, ...]  # the suffix included
    later: tuple[int, ...]
    suffix: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> ReplayPrompt:
        """KVzip's instructions, closed as the chat template closes the user's turn."""
        rendered = tokenizer.chat([{"role": "user", "content": _MARK}])
        suffix = rendered.split(_MARK)[-1]
        return cls(
            first=tuple(tokenizer.encode(f"\n\n{REPEAT_FIRST}{suffix}")),
            later=tuple(tokenizer.encode(f"\n\n{REPEAT_LATER}")),
            suffix=tuple(tokenizer.encode(suffix)),
        )


def replay(
    model: Decoder,
    cache: PaddedCache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    prompt: ReplayPrompt,
    *,
    chunk: int = 2048,
    first_tokens: int = 4,
) -> Float[Array, "L B K T"]:
    """The score of every entry of a full cache, from feeding its context again chunk by chunk.

    Each chunk is an instruction to repeat it followed by its tokens, run against the full cache
    and then forgotten. `tokens`, `lengths` are those that `observe` took. Costs one to two
    prefills. Source: KVzip (arXiv 2505.23416).
    """
    length = tokens.shape[1]
    scores = jnp.zeros(cache.positions.shape, jnp.float32)
    for start in range(0, length, chunk):
        piece = tokens[:, start : start + chunk]
        if start == 0:
            before = jnp.asarray([prompt.first], jnp.int32)
            before = jnp.broadcast_to(before, (tokens.shape[0], before.shape[1]))
        else:
            later, suffix = (
                jnp.broadcast_to(jnp.asarray([ids], jnp.int32), (tokens.shape[0], len(ids)))
                for ids in (prompt.later, prompt.suffix)
            )
            before = jnp.concatenate([later, tokens[:, start - OVERLAP : start], suffix], axis=1)
        end = min(start + chunk, length)
        bounds = jnp.stack([jnp.full_like(lengths, start), jnp.minimum(lengths, end)], axis=1)
        fed = jnp.concatenate([before, piece], axis=1)
        here = jnp.where(lengths > start, before.shape[1] + bounds[:, 1] - start, 0)
        found = _replay_chunk(model, cache, fed, here, bounds, first_tokens=first_tokens)
        scores = jnp.maximum(scores, found)
    return scores


def _replay_chunk(
    model: Decoder,
    cache: PaddedCache,
    tokens: Int[Array, "B R"],
    lengths: Int[Array, " B"],
    bounds: Int[Array, "B 2"],
    *,
    first_tokens: int,
) -> Float[Array, "L B K T"]:
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(place < lengths[:, None], cache.next_position[:, None] + place, -1)
    rotation = model.rotation(positions)

    def body(x: Array, inputs: Any) -> tuple[Array, Array]:
        layer, window, view = inputs
        new = layer.project(x, *rotation)
        spread = jnp.broadcast_to(positions[:, None], new.keys.shape[:3])
        own = attention(new.queries, new.keys, new.values, positions, spread, window)
        out, _ = merge(cache.attend(view, new.queries, positions, window), own)
        keys, _, slots = cache.dense(view)
        found = kvzip_chunk_scores(
            new.queries, positions, new.keys, keys, slots, bounds, first_tokens=first_tokens
        )
        return layer.finish(x, out), found

    inputs = (model.layers, jnp.asarray(model.windows), cache.views)
    return lax.scan(body, model.embed(tokens), inputs)[1]


compiled_replay = jax.jit(replay, static_argnames=("prompt", "chunk", "first_tokens"))
