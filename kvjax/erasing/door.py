"""`kvjax.erase`: checks what it is given, and runs one compiled edit per method and extent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.batches import Tokens, as_batch
from kvjax.budget import bucket_length
from kvjax.cache import Cache
from kvjax.checks import check_cache, check_ids, check_room
from kvjax.erasing.given import Spans, as_spans, ordered, sorted_spans
from kvjax.erasing.method import Edit, Method
from kvjax.erasing.methods import erasing_method
from kvjax.erasing.note import PromptNote
from kvjax.erasing.spans import Extent
from kvjax.learned.eraser import Eraser, check_eraser
from kvjax.models.decoder import Decoder
from kvjax.policies.observation import MODALITY


def erase(
    model: Decoder,
    eraser: Eraser | None,
    cache: Cache,
    tokens: Tokens,
    spans: Spans,
    *,
    method: Method | str = "kveraser",
    extent: Extent | None = None,
    donate: bool = False,
) -> Cache:
    """The cache of a processed context, edited so that spans of it no longer act.

    Args:
      model: the decoder that filled the cache.
      eraser: trained adapters (`load_eraser`); None for methods that use none.
      cache: padded or paged, full or evicted.
      tokens: the ids of everything the cache has seen, as `prefill` takes them: a cache does not
        know them. More columns than that are not looked at.
      spans: what to erase, (start, stop) in token positions: one pair, or a list of pairs, for a
        cache of one row; a list of pairs for each row; or an int array [B, N, 2] in which (0, 0)
        is no span.
      method: a `Method`, or the name of one (`kvjax.erasing.METHODS`) with its defaults.
      extent: bounds on the spans, which fix the shapes. Default: their buckets, so that spans of
        similar length and place share a compilation; under jit, where spans are not known, the
        widest, which is correct and slow.
      donate: edit in place. The cache given must not be used again; without this it is copied,
        which for a long suffix can take longer than the edit.

    Returns:
      The cache, to be extended with a question. In an evicted cache only entries of a span that
      are still there are replaced or dropped, head by head. A policy's state is left as it is:
      slot state stays with its slot, and goes where the slot is dropped.

    Raises:
      ValueError: spans that overlap, are empty or outside the tokens seen; an extent that does not
        hold them; tokens that are too few; a missing or foreign eraser; a cache that carries a
        memory of evicted entries, or a note for one whose policy goes on evicting.
    """
    method = erasing_method(method) if isinstance(method, str) else method
    method.check(model)
    check_cache(model, cache)
    if cache.policy_state.memory:
        raise ValueError(
            "erase: this cache carries a memory of evicted entries, out of which nothing can be "
            "taken; allowed are caches of policies without one"
        )
    if method.needs_eraser:
        if eraser is None:
            raise ValueError(f"method {method.name!r} needs an eraser: see kvjax.load_eraser")
        check_eraser(eraser, model.config)
    ids, _ = as_batch(tokens, None)
    pairs = as_spans(spans, cache.batch)
    _check_tokens(model, cache, ids)
    if isinstance(method, PromptNote):
        if cache.policy_state.own or cache.policy_state.slots.keys() - {MODALITY}:
            raise ValueError(
                f"method {method.name!r}: this cache's policy goes on evicting; append a note "
                "with kvjax.extend, which takes the policy"
            )
        check_ids(model, jnp.asarray(method.note, jnp.int32)[None])
        check_room(cache, jnp.full(cache.batch, len(method.note), jnp.int32))
    if _traced(pairs, cache.next_position):
        pairs = sorted_spans(jnp.asarray(pairs, jnp.int32))
        extent = extent or Extent(span=ids.shape[1], prefix=cache.capacity, suffix=ids.shape[1])
    else:
        seen = np.asarray(cache.next_position)
        pairs = ordered(np.asarray(pairs), seen)
        needed = Extent.needed(pairs, seen, cache.capacity)
        extent = extent or needed.bucket(cache.capacity)
        extent.check(needed)
    width = bucket_length(ids.shape[1])
    ids = jnp.pad(ids, ((0, 0), (0, width - ids.shape[1])))
    used = eraser if method.needs_eraser else None
    run = _apply_in_place if donate else _apply
    return run(model, used, cache, ids, jnp.asarray(pairs, jnp.int32), method, extent)


def apply(
    model: Decoder,
    eraser: Eraser | None,
    cache: Cache,
    tokens: Int[Array, "B T"],
    spans: Int[Array, "B N 2"],
    method: Method,
    extent: Extent,
) -> Cache:
    """`erase` without checks: pure, for jit and for gradients with respect to the eraser.

    `spans` ascend in each row and do not overlap.
    """
    adapters = None if eraser is None else eraser.adapters
    return method.apply(
        Edit(model=model, cache=cache, tokens=tokens, spans=spans, extent=extent, adapters=adapters)
    )


_apply = jax.jit(apply, static_argnames=("method", "extent"))
_apply_in_place = jax.jit(apply, static_argnames=("method", "extent"), donate_argnames="cache")


def _check_tokens(model: Decoder, cache: Cache, ids: Int[Array, "B T"]) -> None:
    if ids.shape[0] != cache.batch:
        raise ValueError(f"tokens of {ids.shape[0]} rows: the cache has {cache.batch}")
    check_ids(model, ids)
    if _traced(cache.next_position):
        return
    if (longest := int(np.max(np.asarray(cache.next_position)))) > ids.shape[1]:
        raise ValueError(f"{ids.shape[1]} tokens: the cache has seen {longest}, give all")


def _traced(*arrays: object) -> bool:
    return any(isinstance(array, jax.core.Tracer) for array in arrays)
