"""The door: checked, compiled calls around the pure functions of `decoding` and `generation`.

Everything here takes plain values (policy names, budgets as fractions, token lists), checks them
in Python, and runs one compiled function per (bucket, capacity, policy). Inside your own
`jax.jit`, call the same functions with arrays and an explicit capacity: checks that need values
are then left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import decoding, generation
from kvjax.budget import Budget
from kvjax.cache import Cache, PaddedCache, Pages
from kvjax.decoding import Observed
from kvjax.eviction import capacity_for, state_fields
from kvjax.generation import Generation, Sampling
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy, Uniform
from kvjax.policies.registry import policy as named_policy
from kvjax.repetition import ReplayPrompt, compiled_replay
from kvjax.turns import ChatTokenizer

type Tokens = Int[Array | np.ndarray, "B T"] | Sequence[Sequence[int]] | Sequence[int]
type Lengths = Int[Array | np.ndarray, " B"] | Sequence[int] | None

_STORAGE = ("policy", "capacity", "pages")
_prefill = jax.jit(decoding.prefill, static_argnames=_STORAGE)
_prefill_chunked = jax.jit(decoding.prefill_chunked, static_argnames=_STORAGE)
_observe = jax.jit(decoding.observe, static_argnames=("policies",))
_compress = jax.jit(decoding.compress, static_argnames=_STORAGE)
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

    Returns:
      Logits [B, V] of each row's last token in float32, and the cache.

    Raises:
      ValueError: empty prompt, prompt beyond the model's context, a budget or policy that is not
        allowed.
    """
    policy = _as_policy(policy)
    if "replay" in policy.needs:
        raise ValueError(
            f"policy {policy.name!r} replays the whole context after its prefill: use observe, "
            "replay and compress (with prefill='whole')"
        )
    tokens, lengths = _as_batch(tokens, lengths)
    check_tokens(model, tokens, lengths)
    entries = resolve_budget(model, budget, lengths)
    capacity, pages = _storage(
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
    )


def observe(
    model: Decoder,
    tokens: Tokens,
    lengths: Lengths = None,
    *,
    policies: Sequence[Policy] = (),
) -> tuple[Float[Array, "B V"], PaddedCache, Observed]:
    """One prefill that serves every policy: logits, the full cache, and what `compress` needs."""
    tokens, lengths = _as_batch(tokens, lengths)
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
    tokens, lengths = _as_batch(tokens, lengths)
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
) -> Cache:
    """The cache that `prefill` with this policy and budget leaves, from `observe`'s full cache."""
    policy = _as_policy(policy)
    entries = resolve_budget(model, budget, cache.next_position)
    capacity, pages = _storage(
        model, policy, budget, entries, cache.capacity, room, capacity, pages
    )
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
) -> tuple[Float[Array, "B V"], Cache]:
    """Appends tokens (a question, a turn) to a cache; see `decoding.extend`.

    Raises:
      ValueError: the tokens find no free slots and no policy makes room.
    """
    tokens, lengths = _as_batch(tokens, lengths)
    check_cache(model, cache)
    check_ids(model, tokens)
    if tokens.shape[0] != cache.batch:
        raise ValueError(f"tokens of {tokens.shape[0]} rows: the cache has {cache.batch}")
    if interval is not None and interval < 1:
        raise ValueError(f"interval {interval}: allowed are integers >= 1")
    evicts = _evicts(policy, interval)
    entries = _as_entries(budget, cache.batch) if evicts else None
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
        policy=policy if evicts else None,
        params=params if evicts else None,
        interval=interval,
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
      ValueError: the cache has no room for `max_new_tokens` and no policy makes room.
    """
    check_cache(model, cache)
    if logits.shape != (cache.batch, model.config.vocab_size):
        raise ValueError(
            f"logits of shape {logits.shape}: allowed is {(cache.batch, model.config.vocab_size)}"
        )
    evicts = _evicts(policy, None)
    entries = _as_entries(budget, cache.batch) if evicts else None
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
        policy=policy if evicts else None,
        budget=entries,
        params=params if evicts else None,
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


def resolve_budget(model: Decoder, budget: Any, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
    """Entries per head for each row; see `Budget`."""
    if isinstance(budget, jax.Array | np.ndarray):
        return _as_entries(budget, lengths.shape[0])
    if isinstance(lengths, jax.core.Tracer):
        raise ValueError(
            f"budget {budget!r} under jit: the lengths are not known, pass an int array of "
            "entries per head"
        )
    parsed = Budget.parse(budget)
    resolve = partial(parsed.resolve, config=model.config, dtype=model.dtype)
    return jnp.asarray([resolve(int(length)) for length in lengths], jnp.int32)


def largest_budget(model: Decoder, budget: Any, entries: Int[Array, " B"], length: int) -> int:
    """The most entries per head that `budget` gives prompts padded to `length`.

    It depends on the bucket and not on the prompt, and so do the shapes that follow from it.
    """
    if isinstance(entries, jax.core.Tracer):
        raise ValueError("a budget that is data under jit needs an explicit capacity")
    if isinstance(budget, jax.Array | np.ndarray):
        return int(np.asarray(budget).max())
    return Budget.parse(budget).resolve(length, model.config, model.dtype)


def default_capacity(model: Decoder, policy: Policy, largest: int, length: int, room: int) -> int:
    """Slots per head for prompts padded to `length` with at most `largest` entries per head."""
    if room < 0:
        raise ValueError(f"room {room}: allowed are integers >= 0")
    windows = [int(window) for window in model.windows]
    return capacity_for(policy, largest, length, windows, model.config.num_kv_heads, room)


def default_pages(
    model: Decoder,
    policy: Policy,
    largest: int,
    length: int,
    room: int,
    capacity: int,
    size: int,
) -> Pages:
    """Pages for the sum of all heads' budgets, plus what they may grow by."""
    config = model.config
    heads = config.num_layers * config.num_kv_heads
    uniform = dataclasses.replace(policy, allocator=Uniform())
    mean = default_capacity(model, uniform, largest, length, room)
    return Pages.holding(heads * mean, heads=heads, capacity=capacity, size=size)


def check_tokens(model: Decoder, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]) -> None:
    """Refuses empty prompts, prompts beyond the context and ids outside the vocabulary."""
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    counts, limit = np.asarray(lengths), model.config.max_length
    if counts.size == 0 or counts.min() < 1:
        raise ValueError("empty prompt: every row needs at least one token")
    if counts.max() > tokens.shape[1]:
        raise ValueError(f"length {counts.max()}: the tokens have {tokens.shape[1]} columns")
    if counts.max() > limit:
        raise ValueError(f"prompt of {counts.max()} tokens: this model's context is {limit} tokens")
    check_ids(model, tokens)


def check_ids(model: Decoder, tokens: Int[Array, "B T"]) -> None:
    """Refuses ids outside the vocabulary, whose embeddings would be NaN."""
    if isinstance(tokens, jax.core.Tracer) or tokens.size == 0:
        return
    ids = np.asarray(tokens)
    if ids.min() < 0 or ids.max() >= model.config.vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"token id {wrong}: allowed are 0 to {model.config.vocab_size - 1}")


def check_cache(model: Decoder, cache: Cache) -> None:
    """Refuses a cache whose shape or dtype is not this model's."""
    config = model.config
    wanted = (config.num_layers, config.num_kv_heads, config.head_dim)
    found = (cache.num_layers, cache.num_kv_heads, cache.head_dim)
    if wanted != found:
        raise ValueError(
            f"cache of another model: (layers, KV heads, head size) {found}, the model has {wanted}"
        )
    if cache.keys.dtype != model.dtype:
        raise ValueError(f"cache of dtype {cache.keys.dtype}: this model computes in {model.dtype}")


def check_state(model: Decoder, cache: Cache, policy: Policy) -> None:
    """Refuses a cache without the state that a policy of repeated eviction carries along."""
    config, state = model.config, cache.policy_state
    slots, layer = state_fields(policy, config.num_heads, config.head_dim, model.dtype)
    wanted, found = sorted({*slots, *layer}), sorted({*state.slots, *state.layer})
    if wanted != found:
        raise ValueError(
            f"policy {policy.name!r} carries the state {wanted}, this cache {found}: prefill with "
            "the policy and decode_interval that go on"
        )


def check_capacity(
    model: Decoder,
    policy: Policy,
    capacity: int,
    entries: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> None:
    """Refuses slots that do not hold what has to stay."""
    if capacity < 1:
        raise ValueError(f"capacity {capacity}: allowed are integers >= 1")
    if isinstance(entries, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    counts = np.asarray(lengths)
    local = max((window for window in model.config.windows if window is not None), default=0)
    wanted = counts if policy.scorer is None else np.maximum(np.asarray(entries), local)
    if (needed := int(np.minimum(wanted, counts).max())) > capacity:
        raise ValueError(
            f"capacity {capacity}: policy {policy.name!r} keeps up to {needed} entries per head "
            "of these prompts"
        )


def check_room(cache: Cache, counts: Int[Array, " B"], finished: Array | None = None) -> None:
    """Refuses more tokens than every head has free slots for."""
    if isinstance(cache.lengths, jax.core.Tracer) or isinstance(counts, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():  # concrete also where a jit closes over the cache
        wanted, room = np.asarray(counts), np.asarray(cache.room())
    if finished is not None and not isinstance(finished, jax.core.Tracer):
        wanted = np.where(np.asarray(finished), 0, wanted)
    if (short := wanted > room).any():
        row = int(np.argmax(short))
        raise ValueError(
            f"{wanted[row]} tokens for a cache with room for {room[row]} (capacity "
            f"{cache.capacity}): prefill with more room, or with a decode_interval"
        )


def _storage(
    model: Decoder,
    policy: Policy,
    budget: Any,
    entries: Int[Array, " B"],
    length: int,
    room: int,
    capacity: int | None,
    pages: Pages | int | None,
) -> tuple[int, Pages | None]:
    """Capacity and page layout, derived where they are not given."""
    if capacity is not None and not isinstance(pages, int):
        return capacity, pages
    largest = largest_budget(model, budget, entries, length)
    if capacity is None:
        capacity = default_capacity(model, policy, largest, length, room)
    if isinstance(pages, int):
        pages = default_pages(model, policy, largest, length, room, capacity, pages)
    return capacity, pages


def _evicts(policy: Policy | None, interval: int | None) -> bool:
    if policy is None or policy.scorer is None:
        return False
    return interval is not None or policy.schedule.decode_interval is not None


def _as_policy(policy: Policy | str) -> Policy:
    return named_policy(policy) if isinstance(policy, str) else policy


def _as_entries(budget: Any, batch: int) -> Int[Array, " B"]:
    if budget is None:
        raise ValueError("a policy that evicts while decoding needs a budget (entries per head)")
    if isinstance(budget, bool | float | str):
        raise ValueError(f"budget {budget!r} here: allowed are entries per head, an int or [B]")
    if not isinstance(budget, jax.core.Tracer):
        given = np.asarray(budget)
        if given.dtype.kind not in "iu" or given.shape not in ((), (1,), (batch,)):
            raise ValueError(
                f"budget {given.tolist()} here: allowed are entries per head, an int or one for "
                f"each of {batch} rows"
            )
        if given.min() < 1:
            raise ValueError(f"budget {given.min()} entries: allowed are integers >= 1")
    entries = jnp.asarray(budget, jnp.int32)
    return jnp.broadcast_to(entries, (batch,))


def _as_batch(tokens: Tokens, lengths: Lengths) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    if isinstance(tokens, jax.Array | np.ndarray):
        if tokens.ndim != 2:
            raise ValueError(f"tokens of shape {tokens.shape}: allowed is [batch, length]")
        _check_integers(tokens)
        if lengths is None:
            lengths = np.full(tokens.shape[0], tokens.shape[1])
        if not isinstance(lengths, jax.Array):
            lengths = np.asarray(lengths)
        _check_integers(lengths, "lengths")
        if lengths.shape != tokens.shape[:1]:
            raise ValueError(
                f"lengths of shape {lengths.shape}: allowed is one for each of "
                f"{tokens.shape[0]} rows"
            )
        return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)
    if lengths is not None:
        raise ValueError("lengths go with an array of tokens; lists have their own")
    rows = [list(row) if isinstance(row, Sequence) else [row] for row in tokens]
    if tokens and not isinstance(tokens[0], Sequence):
        rows = [[row[0] for row in rows]]
    if not rows or any(not row for row in rows):
        raise ValueError("empty prompt: every row needs at least one token")
    counts = [len(row) for row in rows]
    padded = np.zeros((len(rows), max(counts)), np.int32)
    for index, row in enumerate(rows):
        _check_integers(np.asarray(row))
        padded[index, : len(row)] = row
    return jnp.asarray(padded), jnp.asarray(counts, jnp.int32)


def _check_integers(array: Array | np.ndarray, name: str = "tokens") -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} of dtype {array.dtype}: allowed are integers")
