"""Dispatch of decode attention over padded and paged caches."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.attention import NO_WINDOW
from kernels_pallas.ragged_decode.sinks import always_near

type DecodeImplementation = Literal["reference", "dense", "mosaic_tpu", "mosaic_gpu"]
type PagedImplementation = Literal["reference", "split", "gathered", "mosaic_tpu", "mosaic_gpu"]
type MassImplementation = Literal["reference", "two_pass", "mosaic_tpu", "mosaic_gpu"]

_PACKAGE = "kernels_pallas.ragged_decode"
_KERNELS = ("mosaic_tpu", "mosaic_gpu")
_DECODE = dispatch.Operation("decode_attention", _PACKAGE, ("reference", "dense", *_KERNELS))
_PAGED = dispatch.Operation(
    "paged_attention", _PACKAGE, ("reference", "split", "gathered", *_KERNELS)
)
_DECODE_MASS = dispatch.Operation("decode_mass", _PACKAGE, ("reference", "two_pass", *_KERNELS))
_PAGED_MASS = dispatch.Operation("paged_mass", _PACKAGE, ("reference", "two_pass", *_KERNELS))


def decode_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    sinks: int = 0,
    implementation: DecodeImplementation | None = None,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """Attention over the first `lengths` slots of each head: output and float32 log-sum-exp.

    Slots behind the length may hold any finite values. A sliding `window` leaves out what is as far
    behind a query, but not the first `sinks` positions (StreamingLLM, arXiv 2309.17453), provided
    that the queries of a call lie within one window of each other. `implementation` None takes
    the platform's kernel, whose bytes follow the lengths, and otherwise "dense": `attention` over
    all slots.
    """
    at = always_near(key_positions, query_positions, sinks)
    arguments = (queries, keys, values, query_positions, at, lengths, window)
    return _DECODE(*arguments, implementation=implementation, portable="dense")


def paged_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    sinks: int = 0,
    implementation: PagedImplementation | None = None,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """Attention over the first `lengths` slots of each head's pages: output and log-sum-exp.

    `window` and `sinks` as of `decode_attention`. `implementation` None takes the platform's
    kernel; without one the page-proportional split for up to 8 queries, while more queries share
    the cost of gathering the pages once.
    """
    at = always_near(positions, query_positions, sinks)
    arguments = (queries, keys, values, at, page_table, lengths, query_positions, window)
    portable = "split" if queries.shape[2] <= 8 else "gathered"
    return _PAGED(*arguments, implementation=implementation, portable=portable)


def decode_mass(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    others: Float[Array, "B H Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    sinks: int = 0,
    implementation: MassImplementation | None = None,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """`decode_attention`, and what decode-time scorers ask for: how much attention a slot got.

    The mass is each slot's softmax weight summed over the queries, where the softmax goes over the
    slots and over entries elsewhere, such as the current tokens, whose log-sum-exp is `others`
    (-inf for none). `implementation` None takes the platform's kernel, which writes the logits of
    its one pass (4 bytes per slot and query), and otherwise "two_pass".
    """
    at = always_near(key_positions, query_positions, sinks)
    arguments = (queries, keys, values, query_positions, at, lengths, others, window)
    return _DECODE_MASS(*arguments, implementation=implementation, portable="two_pass")


def paged_mass(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    others: Float[Array, "B H Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
    *,
    sinks: int = 0,
    implementation: MassImplementation | None = None,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """`decode_mass` over pages; the mass is in slot order, S = M * P."""
    at = always_near(positions, query_positions, sinks)
    rest = (page_table, lengths, query_positions, others, window)
    return _PAGED_MASS(
        queries, keys, values, at, *rest, implementation=implementation, portable="two_pass"
    )
