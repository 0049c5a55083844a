"""Where the slots of a padded or paged cache lie for TMA: one array of rows.

Copies into swizzled tiles see the array as tiles of 8 rows, and Pallas has no such view of one that
ends within a tile (nor of a part of an array). A head of a padded cache may begin and end within
tiles, but all heads' slots together fill them; to pad the others would copy the cache in each step.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels_pallas.attention.blocks import pad_to
from kernels_pallas.ragged_decode import reference

BLOCK = 64  # slots


@dataclasses.dataclass(frozen=True)
class Cache:
    """Where a head's slots lie: rows of [F, D], all heads' or all pages' one after the other."""

    keys: Array
    values: Array
    positions: Array  # [B * K * S'], heads one after the other; -1 where nothing is
    slots: int  # S, of a head
    page: int | None = None  # P
    table: Array | None = None  # [B * K, copies of all blocks], the first row of each copy

    @property
    def rows_per_copy(self) -> int:
        return min(self.page or BLOCK, BLOCK)

    @property
    def whole_heads(self) -> bool:
        """Whether blocks can end where a head ends; else they read on into the next head's."""
        return self.slots % 8 == 0 and self.slots >= BLOCK

    def logit_columns(self, heads: int) -> Int[Array, "N S"]:
        """Where each slot's logit is among those of its head's blocks, which begin at rows of 8.

        A block that would end behind the last row begins earlier, by as many columns.
        """
        base = jnp.arange(heads, dtype=jnp.int32)[:, None] * self.slots
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None]
        first = (slot + base % 8) // BLOCK * BLOCK
        begins = jnp.minimum(base - base % 8 + first, self.positions.shape[0] - BLOCK)
        return first + slot - (begins - base)


def padded(keys: Array, values: Array, positions: Array) -> Cache:
    slots, size = keys.shape[2:]
    keys, values = keys.reshape(-1, size), values.reshape(-1, size)
    positions = positions.reshape(-1)
    total = positions.shape[0]
    if total < BLOCK:
        keys, values = pad_to(keys, BLOCK, 0), pad_to(values, BLOCK, 0)
        positions = pad_to(positions, BLOCK, 0, fill=-1)
    elif total % 8:
        raise NotImplementedError(
            f"{total} slots in all heads together: allowed are multiples of 8"
        )
    return Cache(keys, values, positions, slots)


def paged(keys: Array, values: Array, positions: Array, page_table: Array, lengths: Array) -> Cache:
    batch, pool, page, size = keys.shape
    if page % 8 or (BLOCK % page and page % BLOCK):
        raise NotImplementedError(
            f"pages of {page} slots: allowed are 8, 16, 32 and multiples of {BLOCK}"
        )
    # Copies of a page's positions would start between TMA's 128 byte lines; a gather of 4 bytes
    # per slot of capacity costs under 1 % of the keys and values.
    slots = reference.slot_positions(positions, page_table, lengths)
    rows_per_copy = min(page, BLOCK)
    copies = -(-slots.shape[2] // BLOCK) * (BLOCK // rows_per_copy)
    slot = jnp.minimum(jnp.arange(copies, dtype=jnp.int32) * rows_per_copy, slots.shape[2] - 1)
    number = jnp.maximum(page_table, 0)[:, :, slot // page]
    number += jnp.arange(batch, dtype=jnp.int32)[:, None, None] * pool
    table = number * page + (slot % page)[None, None]
    return Cache(
        keys.reshape(-1, size),
        values.reshape(-1, size),
        pad_to(slots, BLOCK, 2, fill=-1).reshape(-1),
        slots.shape[2],
        page,
        table.reshape(-1, copies),
    )
