"""Where the slots of a padded or paged cache lie for TMA: one array of rows."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

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


def padded(keys: Array, values: Array, positions: Array) -> Cache:
    slots, size = keys.shape[2:]
    flat = [keys.reshape(-1, size), values.reshape(-1, size), positions.reshape(-1)]
    total = flat[2].shape[0]
    if total < BLOCK:
        flat = [pad_to(array, BLOCK, 0, fill=-(array.ndim == 1)) for array in flat]
    elif total % 8:
        raise NotImplementedError(
            f"{total} slots in all heads together: allowed are multiples of 8"
        )
    return Cache(*flat, slots)


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
