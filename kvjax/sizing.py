"""From a budget to static shapes: entries per head, slots per head, pages per row."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.budget import Budget
from kvjax.cache import Pages
from kvjax.eviction import capacity_for
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy, Uniform

_PAGE = 16  # slots


def resolve_budget(model: Decoder, budget: Any, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
    """Entries per head for each row; see `Budget`."""
    if isinstance(budget, jax.Array | np.ndarray):
        return as_entries(budget, lengths.shape[0])
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


def default_page_size(policy: Policy) -> int | None:
    """A page size where heads get uneven shares, so that bytes follow their sum; else None.

    A padded cache gives every head the slots of the largest.
    """
    return None if type(policy.allocator) is Uniform else _PAGE


def storage(
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


def as_entries(budget: Any, batch: int) -> Int[Array, " B"]:
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
