"""Attention dilution, measured: how much of a question's attention falls on the tokens it needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from kvjax import remembering
from kvjax.cache import Cache
from kvjax.layer_steps import attend, prompt_positions
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy

_NEEDS = frozenset({"column_attention"})


@partial(jax.jit, static_argnames="policy")
def useful_mass(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    useful: Bool[Array, "B P"],
    policy: Policy | None = None,
    params: Any = None,
) -> Float32[Array, "L B H"]:
    """Mean over a row's new tokens of their softmax weight on the cached entries of U.

    U are the entries whose absolute position is true in `useful`; positions from P on are not
    useful. With z the scaled logits of new token t in one layer and query head,

        mass = 1/n sum_(t < n)  sum_(i in U and cached) e^(z_ti) / sum_(j seen by t) e^(z_tj).

    The denominator is that of the model's own attention: cached entries and new tokens up to t,
    within the layer's window. New tokens are never in U. Each layer's input comes from the layers
    before, which see this cache too: behind the first layer, eviction also changes the queries,
    and so does a memory, which is no entry and has no share of its own.

    docs/theory.md counts entries of the cache alone: its delta is 1 - mass(U) / mass(all true),
    exact for one new token. The cache is only read; a row of length 0 gets 0.

    Args:
      model: the decoder.
      cache: padded or paged, with or without the state of a policy.
      tokens: the right-padded new tokens, such as a question.
      lengths: new tokens of each row.
      useful: over absolute positions.
      policy, params: what wrote the memory of a cache that carries one.
    """
    remembered = remembering.memory_of(cache, policy, params, model.config)
    place = prompt_positions(tokens, lengths)
    positions = jnp.where(place >= 0, cache.next_position[:, None] + place, -1)
    rotation = model.rotation(positions)
    count = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None]

    def body(x: Array, inputs: Any) -> tuple[Array, Array]:
        layer, window, view, *remembered = inputs
        read = remembering.reader(policy, *remembered)
        x, _, column = attend(layer, x, rotation, positions, window, _NEEDS, (cache, view), read)
        assert column is not None
        slots = cache.dense(view)[2]
        width = slots.shape[2]
        wanted = jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=False))
        inside = wanted(useful, jnp.where(slots >= 0, slots, useful.shape[1]))
        by_head = column[:, :, :width].reshape(*slots.shape[:2], -1, width)
        mass = jnp.sum(jnp.where(inside[:, :, None], by_head, 0), axis=-1)
        return x, mass.reshape(column.shape[:2]) / count

    inputs = (model.layers, jnp.asarray(model.windows), cache.views, *remembered)
    return lax.scan(body, model.embed(tokens), inputs)[1]


def passage_tokens(texts: Sequence[str], passage: str) -> Bool[np.ndarray, " T"]:
    """Which tokens hold a character of the passage, where it occurs last in the tokens' text.

    Args:
      texts: the text that each token completes (`passages.token_texts`); a token that only
        begins a character has "" and counts with that character.
      passage: a part of the joined texts.

    Raises:
      ValueError: the joined texts do not hold the passage.
    """
    start = "".join(texts).rfind(passage)
    if start < 0 or not passage:
        raise ValueError(
            f"passage {_short(passage)}: the prompt's tokens do not spell it; allowed is a part of "
            "the prompt, without the white space that the chat template strips"
        )
    ends = np.cumsum([len(text) for text in texts])
    begins = ends - [len(text) for text in texts]
    return (begins < start + len(passage)) & (np.maximum(ends, begins + 1) > start)


def check_passage(prompt: str, passage: str) -> None:
    """Refuses a passage that names no single place of the prompt.

    Raises:
      ValueError: the passage is empty, or does not occur exactly once in the prompt.
    """
    if not passage.strip():
        raise ValueError("passage: it is empty; allowed is a part of the prompt")
    found = sum(prompt.startswith(passage, at) for at in range(len(prompt)))
    if found != 1:
        raise ValueError(
            f"passage {_short(passage)}: found {found} times in the prompt; allowed is a text that "
            "occurs exactly once, to the letter"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
