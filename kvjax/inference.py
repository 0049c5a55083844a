"""The door: checked, compiled calls around the pure functions of `decoding` and `generation`.

Everything here takes plain values (policy names, budgets as fractions, token lists), checks them
in Python, and runs one compiled function per (bucket, capacity, policy). Inside your own
`jax.jit`, call the same functions with arrays and an explicit capacity: checks that need values
are then left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax import compression, decoding, generation
from kvjax.batches import Lengths, Tokens, as_batch, as_modalities
from kvjax.cache import Cache, PaddedCache, Pages
from kvjax.checks import (
    check_cache,
    check_capacity,
    check_ids,
    check_room,
    check_state,
    check_tokens,
)
from kvjax.compression import Observed
from kvjax.generation import Generation, Sampling
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.registry import policy as named_policy
from kvjax.repetition import ReplayPrompt, compiled_replay
from kvjax.sizing import as_entries, resolve_budget, storage
from kvjax.turns import ChatTokenizer

_STORAGE = ("policy", "capacity", "pages")
_prefill = jax.jit(decoding.prefill, static_argnames=_STORAGE)
_prefill_chunked = jax.jit(decoding.prefill_chunked, static_argnames=_STORAGE)
_observe = jax.jit(compression.observe, static_argnames=("policies",))
_compress = jax.jit(compression.compress, static_argnames=_STORAGE)
_extend = jax.jit(decoding.extend, static_argnames=("policy", "interval"))
_GENERATE_STATIC = ("max_new_tokens", "end_tokens", "sampling", "policy")
_generate = jax.jit(generation.generate, static_argnames=_GENERATE_STATIC)


def prefill(
    model: Decoder,
    tokens: Tokens,
    lengths: Lengths = None,
    *,
    policy: Policy | str = "full",
    budget: Any = 1.0,
    room: int = 0,
    capacity: int | None = None,
    pages: Pages | int | None = None,
    params: Any = None,
    modalities: Tokens | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Reads prompts into a cache of bounded size.

    Args:
      model: the decoder.
      tokens: [B, T] right-padded token ids (pad to `bucket_length` to share compilations), or
        lists of ids, which are padded here.
      lengths: tokens of each row; default all T.
      policy: a `Policy` or a registered name.
      budget: tokens (int), fraction of the prompt (float), bytes ("64MiB"), a `Budget`, or an
        int array [B] of entries per head.
      room: slots beside the budget for tokens to come (questions, answers); not needed with a
        policy that evicts while decoding.
      capacity: slots per head at most; default what budget, policy and room need.
      pages: a page size (16 to 64) for a paged cache, whose bytes follow the sum of the heads'
        budgets; a `Pages` layout to fix its pool; None for a padded cache.
      params: learned arrays of the policy, stacked over layers.
      modalities: an id from 0 (text) to 127 for every token, shaped as the tokens are; the cache
        then carries that of every entry, for `modality_counts`. No policy sees them.

    Returns:
      Logits [B, V] of each row's last token in float32, and the cache.

    Raises:
      ValueError: empty prompt, prompt beyond the model's context, a budget, policy or modality
        that is not allowed.
    """
    policy = _as_policy(policy)
    if "replay" in policy.needs:
        raise ValueError(
            f"policy {policy.name!r} replays the whole context after its prefill: use observe, "
            "replay and compress (with prefill='whole')"
        )
    tokens, lengths = as_batch(tokens, lengths)
    check_tokens(model, tokens, lengths)
    modalities = as_modalities(modalities, tokens.shape, lengths)
    entries = resolve_budget(model, budget, lengths)
    capacity, pages = storage(
        model, policy, budget, entries, tokens.shape[1], room, capacity, pages
    )
    check_capacity(model, policy, capacity, entries, lengths)
    run = _prefill_chunked if policy.schedule.prefill == "chunked" else _prefill
    return run(
        model,
        tokens,
        lengths,
        entries,
        policy=policy,
        capacity=capacity,
        pages=pages,
        params=params,
        modalities=modalities,
    )


def observe(
    model: Decoder,
    tokens: Tokens,
    lengths: Lengths = None,
    *,
    policies: Sequence[Policy] = (),
) -> tuple[Float[Array, "B V"], PaddedCache, Observed]:
    """One prefill that serves every policy: logits, the full cache, and what `compress` needs."""
    tokens, lengths = as_batch(tokens, lengths)
    check_tokens(model, tokens, lengths)
    for policy in policies:
        if policy.schedule.prefill == "chunked":
            raise ValueError(
                f"policy {policy.name!r} evicts during a chunked prefill, which cannot be shared; "
                "use prefill"
            )
    return _observe(model, tokens, lengths, policies=tuple(policies))


def replay(
    model: Decoder,
    cache: PaddedCache,
    observed: Observed,
    tokens: Tokens,
    lengths: Lengths = None,
    *,
    tokenizer: ChatTokenizer,
    chunk: int = 2048,
) -> Observed:
    """What `observe` saw, with the replay scores that KVzip needs; same tokens, same full cache."""
    tokens, lengths = as_batch(tokens, lengths)
    prompt = ReplayPrompt.of(tokenizer)
    scores = compiled_replay(model, cache, tokens, lengths, prompt, chunk=chunk)
    return dataclasses.replace(observed, replay_scores=scores)


def compress(
    model: Decoder,
    cache: PaddedCache,
    observed: Observed,
    *,
    policy: Policy | str,
    budget: Any,
    room: int = 0,
    capacity: int | None = None,
    pages: Pages | int | None = None,
    params: Any = None,
    modalities: Tokens | None = None,
) -> Cache:
    """The cache that `prefill` with this policy and budget leaves, from `observe`'s full cache."""
    policy = _as_policy(policy)
    observed_shape = (cache.batch, cache.capacity)
    modalities = as_modalities(modalities, observed_shape, cache.next_position)
    entries = resolve_budget(model, budget, cache.next_position)
    capacity, pages = storage(model, policy, budget, entries, cache.capacity, room, capacity, pages)
    check_capacity(model, policy, capacity, entries, cache.next_position)
    return _compress(
        model,
        cache,
        observed,
        entries,
        policy=policy,
        capacity=capacity,
        pages=pages,
        params=params,
        modalities=modalities,
    )


def extend(
    model: Decoder,
    cache: Cache,
    tokens: Tokens,
    lengths: Lengths = None,
    *,
    policy: Policy | None = None,
    budget: Any = None,
    params: Any = None,
    interval: int | None = None,
    modalities: Tokens | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Appends tokens (a question, a turn) to a cache; see `decoding.extend`.

    Raises:
      ValueError: the tokens find no free slots and no policy makes room; a cache that carries a
        memory without the policy that wrote it; modalities that are not allowed, or for a cache
        that carries none.
    """
    tokens, lengths = as_batch(tokens, lengths)
    check_cache(model, cache)
    check_ids(model, tokens)
    if tokens.shape[0] != cache.batch:
        raise ValueError(f"tokens of {tokens.shape[0]} rows: the cache has {cache.batch}")
    modalities = as_modalities(modalities, tokens.shape, lengths)
    if interval is not None and interval < 1:
        raise ValueError(f"interval {interval}: allowed are integers >= 1")
    evicts = _evicts(policy, interval)
    entries = as_entries(budget, cache.batch) if evicts else None
    if policy is not None and evicts:
        check_state(model, cache, policy)
    else:
        check_room(cache, lengths)
    return _extend(
        model,
        cache,
        tokens,
        lengths,
        budget=entries,
        interval=interval,
        **_going_on(policy, params, evicts),
        modalities=modalities,
    )


def generate(
    model: Decoder,
    cache: Cache,
    logits: Float[Array, "B V"],
    *,
    max_new_tokens: int,
    end_tokens: Collection[int] = (),
    sampling: Sampling = Sampling(),
    key: Array | None = None,
    first_step: int | Int[Array, ""] = 0,
    finished: Array | None = None,
    policy: Policy | None = None,
    budget: Any = None,
    params: Any = None,
) -> Generation:
    """Decodes with a compiled loop; see `generation.generate`.

    Raises:
      ValueError: the cache has no room for `max_new_tokens` and no policy makes room, or it
        carries a memory and the policy that wrote it is not given.
    """
    check_cache(model, cache)
    if logits.shape != (cache.batch, model.config.vocab_size):
        raise ValueError(
            f"logits of shape {logits.shape}: allowed is {(cache.batch, model.config.vocab_size)}"
        )
    evicts = _evicts(policy, None)
    entries = as_entries(budget, cache.batch) if evicts else None
    if policy is not None and evicts:
        check_state(model, cache, policy)
    else:
        check_room(cache, jnp.full(cache.batch, max_new_tokens, jnp.int32), finished)
    return _generate(
        model,
        cache,
        logits,
        max_new_tokens=max_new_tokens,
        end_tokens=tuple(sorted(end_tokens)),
        sampling=sampling,
        key=key,
        first_step=first_step,
        finished=finished,
        budget=entries,
        **_going_on(policy, params, evicts),
    )


def stream(
    model: Decoder,
    cache: Cache,
    logits: Float[Array, "B V"],
    *,
    max_new_tokens: int,
    block: int = 8,
    key: Array | None = None,
    **options: Any,
) -> Iterator[Generation]:
    """Yields a `Generation` per `block` tokens; together they are what `generate` returns."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: allowed are integers >= 1")
    if block < 1:
        raise ValueError(f"block {block}: allowed are integers >= 1")
    finished = jnp.zeros(logits.shape[0], bool)
    for start in range(0, max_new_tokens, block):
        part = generate(
            model,
            cache,
            logits,
            max_new_tokens=min(block, max_new_tokens - start),
            key=key,
            first_step=start,
            finished=finished,
            **options,
        )
        yield part
        cache, logits, finished = part.cache, part.logits, part.finished
        if bool(jnp.all(finished)):
            return


def _evicts(policy: Policy | None, interval: int | None) -> bool:
    if policy is None or policy.scorer is None:
        return False
    return interval is not None or policy.schedule.decode_interval is not None


def _going_on(policy: Policy | None, params: Any, evicts: bool) -> dict[str, Any]:
    """Policy and params where new tokens have to do with them: others share compilations."""
    if policy is None or not (evicts or policy.remembers):
        return {"policy": None, "params": None}
    return {"policy": policy, "params": params}


def _as_policy(policy: Policy | str) -> Policy:
    return named_policy(policy) if isinstance(policy, str) else policy
