"""Sampling and the decode loop: one `lax.while_loop`, no host round trip per token."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache import Cache
from kvjax.decoding import extend
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn: greedy at temperature 0, else from the filtered softmax.

    `top_k` keeps the k most likely tokens (0 keeps all); `top_p` then keeps the smallest set of
    most likely tokens whose probability reaches p (nucleus sampling, arXiv 1904.09751).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature {self.temperature}: allowed are finite numbers >= 0")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: allowed are integers >= 0 (0 keeps all)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: allowed are numbers in (0, 1]")


def sample(
    logits: Float[Array, "B V"], sampling: Sampling, key: Array | None = None
) -> Int[Array, " B"]:
    """One token per row. `key` is needed above temperature 0."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if key is None:
        raise ValueError(f"temperature {sampling.temperature} needs a key (jax.random.key)")
    logits = logits.astype(jnp.float32)
    # The largest logit at 0 stays finite at any temperature.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        least = lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p < 1:
        descending = jnp.sort(logits, axis=-1, descending=True)
        weights = jax.nn.softmax(descending, axis=-1)
        # A token stays while the mass before it is below p, so the first always stays.
        stays = jnp.cumsum(weights, axis=-1) - weights < sampling.top_p
        least = jnp.min(jnp.where(stays, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """Generated tokens and everything needed to go on."""

    tokens: Int[Array, "B N"]  # 0 behind each row's end
    lengths: Int[Array, " B"]  # tokens before the end token
    finished: Array  # [B] bool: the row produced an end token
    logits: Float[Array, "B V"]  # of the next token
    cache: Cache


def generate(
    model: Decoder,
    cache: Cache,
    logits: Float[Array, "B V"],
    *,
    max_new_tokens: int,
    end_tokens: tuple[int, ...] = (),
    sampling: Sampling = Sampling(),
    key: Array | None = None,
    first_step: int | Int[Array, ""] = 0,
    finished: Array | None = None,
    budget: Int[Array, " B"] | None = None,
    policy: Policy | None = None,
    params: Any = None,
) -> Generation:
    """Decodes up to `max_new_tokens` from the logits that prefill or extend returned.

    A row stops at any of `end_tokens` (which is not put into its cache or counted) and then
    changes no more; the loop ends when all rows have. With a policy of repeated eviction the
    cache is cut back to `budget` as its schedule says; one whose remainder remembers is needed
    where it evicts once, too. To stream, call again with the returned
    logits, cache and `finished`, and with `first_step` the number of steps done: token n is drawn
    with the n-th key whatever the calls.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: allowed are integers >= 1")
    batch = logits.shape[0]
    ends = jnp.asarray(end_tokens or (-1,), jnp.int32)
    if sampling.temperature > 0 and key is None:
        raise ValueError(f"temperature {sampling.temperature} needs a key (jax.random.key)")

    def going(carry: tuple[Array, Generation]) -> Array:
        step, now = carry
        return (step < max_new_tokens) & ~jnp.all(now.finished)

    def decode(carry: tuple[Array, Generation]) -> tuple[Array, Generation]:
        step, now = carry
        step_key = None if key is None else jax.random.fold_in(key, first_step + step)
        token = sample(now.logits, sampling, step_key)
        ended = now.finished | jnp.any(token[:, None] == ends[None], axis=1)
        token = jnp.where(ended, 0, token)
        count = jnp.where(ended, 0, 1).astype(jnp.int32)
        fresh, grown = extend(
            model, now.cache, token[:, None], count, budget=budget, policy=policy, params=params
        )
        return step + 1, Generation(
            tokens=now.tokens.at[:, step].set(token),
            lengths=now.lengths + count,
            finished=ended,
            logits=jnp.where(ended[:, None], now.logits, fresh),
            cache=grown,
        )

    start = Generation(
        tokens=jnp.zeros((batch, max_new_tokens), jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        finished=jnp.zeros(batch, bool) if finished is None else finished,
        logits=logits,
        cache=cache,
    )
    return lax.while_loop(going, decode, (jnp.int32(0), start))[1]
