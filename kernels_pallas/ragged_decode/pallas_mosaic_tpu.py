"""Decode attention on TPU: one pass over the blocks of slots that each head has filled.

Padded caches come through Pallas's own pipeline: the grid covers the capacity, the index map of K
and V stops at the head's last block (its length is prefetched as a scalar), and a block index that
repeats is not copied again. Paged caches are copied page by page into two buffers of `block` slots,
while one is computed the other is filled, over the heads' borders. Blocks behind the length cost
neither bytes nor FLOPs.

Per slot and KV head that is 2 D elements of K and V and one position read (516 bytes at D 128,
bfloat16; lanes pad D to 128), 4 D R FLOPs for R = G * Q rows. Logits, where asked for, write 4 R
bytes per slot. Products of float32 operands are taken in float32 (three bfloat16 passes or more).
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from kernels_pallas.attention.mask import NO_WINDOW
from kernels_pallas.partition import partitioned
from kernels_pallas.ragged_decode import mosaic_tpu_padded as padded
from kernels_pallas.ragged_decode import mosaic_tpu_paged as paged
from kernels_pallas.ragged_decode import partials, reference
from kernels_pallas.ragged_decode.gradient import gradient_of

_PAGES = "B H Q D, B pages P D, B pages P D, B pages P"  # heads share them


@gradient_of(reference.decode_attention)
@partitioned("B H Q D, B K S D, B K S D, B Q, B K S, B K, -> B H Q D, B H Q")
def decode_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference."""
    cache = (keys, values, key_positions, lengths)
    return padded.attend(queries, cache, query_positions, window, with_logits=False)[:2]


@partitioned("B H Q D, B K S D, B K S D, B Q, B K S, B K, B H Q, -> B H Q D, B H Q, B H S")
def decode_mass(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    query_positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B K S"],
    lengths: Int[Array, "B K"],
    others: Float[Array, "B H Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """As the reference."""
    cache = (keys, values, key_positions, lengths)
    out, lse, logits = padded.attend(queries, cache, query_positions, window, with_logits=True)
    return out, lse, partials.mass(logits, partials.total(lse, others))


@gradient_of(reference.paged_attention)
@partitioned(f"{_PAGES}, B K M, B K, B Q, -> B H Q D, B H Q")
def paged_attention(
    queries: Float[Array, "B H Q D"],
    keys: Float[Array, "B N P D"],
    values: Float[Array, "B N P D"],
    positions: Int[Array, "B N P"],
    page_table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    query_positions: Int[Array, "B Q"],
    window: int | Int[Array, ""] = NO_WINDOW,
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
    """As the reference."""
    cache = (keys, values, positions, page_table, lengths)
    return paged.attend(queries, cache, query_positions, window, with_logits=False)[:2]


@partitioned(f"{_PAGES}, B K M, B K, B Q, B H Q, -> B H Q D, B H Q, B H S")
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
) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
    """As the reference."""
    cache = (keys, values, positions, page_table, lengths)
    out, lse, logits = paged.attend(queries, cache, query_positions, window, with_logits=True)
    return out, lse, partials.mass(logits, partials.total(lse, others))
