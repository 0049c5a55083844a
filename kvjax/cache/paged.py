"""A cache whose bytes follow the sum of the budgets: pages from one pool per row."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.gather_compact import compact, gather_slots, in_place
from kernels_pallas.ragged_decode import gather_pages, paged_attention, paged_mass
from kernels_pallas.ragged_decode.reference import slot_positions
from kernels_pallas.select import kept_indices
from kvjax.cache.padded import Absorb, join
from kvjax.policies.observation import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """The static layout of a paged cache.

    A row's heads share `pool` pages of `size` slots. A head holds at most `per_head` of them.
    """

    size: int = 16
    pool: int
    per_head: int

    def __post_init__(self) -> None:
        for name in ("size", "pool", "per_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"pages {name}={getattr(self, name)}: allowed are integers >= 1")

    @classmethod
    def holding(cls, entries: int, *, heads: int, capacity: int, size: int = 16) -> Pages:
        """Pages for `entries` slots in all, over `heads` (layer, KV head) pairs of one row.

        However the entries are split, each head wastes less than one page, so one page per head
        beside entries / size makes running out impossible.
        """
        return cls(size=size, pool=-(-entries // size) + heads, per_head=-(-capacity // size))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCache:
    """Keys and values in pages that heads take from and return to their row's pool.

    Slot s of a head is slot s % P of page `page_table[l, b, k, s // P]`; the first `lengths`
    slots are filled, in position order. The first `free_count` entries of `free` are the pages
    nobody holds. Rows share nothing.
    """

    keys: Float[Array, "B N P D"]
    values: Float[Array, "B N P D"]
    positions: Int[Array, "B N P"]  # of any value behind a head's length
    page_table: Int[Array, "L B K M"]  # -1 where a head holds no page
    lengths: Int[Array, "L B K"]
    free: Int[Array, "B N"]
    free_count: Int[Array, " B"]
    next_position: Int[Array, " B"]
    overflowed: Int[Array, " B"]  # tokens refused because a head or the pool was full
    policy_state: State = dataclasses.field(default_factory=State)  # slots are [B, N, P, ...]

    row_axes: ClassVar[dict[str, int]] = {"page_table": 1, "lengths": 1, "layer": 1}

    @classmethod
    def empty(
        cls,
        *,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        pages: Pages,
        head_dim: int,
        dtype: Any,
        policy_state: State | None = None,
    ) -> PagedCache:
        """A cache with every page free; slot arrays of `policy_state` are [B, N, P, ...]."""
        pool = (batch, pages.pool, pages.size)
        heads = (num_layers, batch, num_kv_heads)
        every = jnp.arange(pages.pool, dtype=jnp.int32)[None]
        return cls(
            keys=jnp.zeros((*pool, head_dim), dtype),
            values=jnp.zeros((*pool, head_dim), dtype),
            positions=jnp.full(pool, -1, jnp.int32),
            page_table=jnp.full((*heads, pages.per_head), -1, jnp.int32),
            lengths=jnp.zeros(heads, jnp.int32),
            free=jnp.broadcast_to(every, (batch, pages.pool)),
            free_count=jnp.full(batch, pages.pool, jnp.int32),
            next_position=jnp.zeros(batch, jnp.int32),
            overflowed=jnp.zeros(batch, jnp.int32),
            policy_state=State() if policy_state is None else policy_state,
        )

    @property
    def num_layers(self) -> int:
        return self.page_table.shape[0]

    @property
    def batch(self) -> int:
        return self.page_table.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.page_table.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[-1]

    @property
    def capacity(self) -> int:
        """The most slots one head can hold."""
        return self.page_table.shape[3] * self.page_size

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]

    @property
    def views(self) -> tuple[Array, Array]:
        """What a scan over layers reads, leading axis L."""
        return self.page_table, self.lengths

    def room(self) -> Int[Array, " B"]:
        """Tokens that every head of a row can still take."""
        free_slots = self.page_table.shape[3] * self.page_size - jnp.max(self.lengths, axis=(0, 2))
        held = -(-self.lengths // self.page_size)
        counts = jnp.arange(1, self.capacity + 1, dtype=jnp.int32)
        wanted = -(-(self.lengths[..., None] + counts[None, None, None]) // self.page_size)
        extra = jnp.sum(wanted - held[..., None], axis=(0, 2))  # [B, n]
        fits = jnp.sum(extra <= self.free_count[:, None], axis=1, dtype=jnp.int32)
        return jnp.minimum(fits, free_slots)

    def attend(
        self,
        view: tuple[Array, Array],
        queries: Float[Array, "B H Q D"],
        query_positions: Int[Array, "B Q"],
        window: int | Int[Array, ""],
    ) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
        """Attention of one layer over its slots: output and log-sum-exp."""
        table, lengths = view
        pools = (self.keys, self.values, self.positions)
        return paged_attention(queries, *pools, table, lengths, query_positions, window)

    def attend_mass(
        self,
        view: tuple[Array, Array],
        queries: Float[Array, "B H Q D"],
        query_positions: Int[Array, "B Q"],
        others: Float[Array, "B H Q"],
        window: int | Int[Array, ""],
    ) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
        """`attend`, and the weights that each slot gets beside entries of log-sum-exp `others`."""
        table, lengths = view
        pools = (self.keys, self.values, self.positions)
        return paged_mass(queries, *pools, table, lengths, query_positions, others, window)

    def dense(
        self, view: tuple[Array, Array]
    ) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"], Int[Array, "B K S"]]:
        """Keys, values and positions of one layer's slots, gathered; S is the capacity."""
        table, lengths = view
        positions = slot_positions(self.positions, table, lengths)
        return gather_pages(self.keys, table), gather_pages(self.values, table), positions

    def dense_slots(self, view: tuple[Array, Array], index: Array) -> dict[str, Array]:
        """The policy's slot arrays of one layer, gathered like the keys."""
        del index
        return {name: gather_pages(pool, view[0]) for name, pool in self.policy_state.slots.items()}

    def append(
        self,
        keys: Float[Array, "L B K T D"],
        values: Float[Array, "L B K T D"],
        positions: Int[Array, "B T"],
        state: State,
    ) -> PagedCache:
        """Writes the call's valid tokens behind each head's last filled slot.

        Heads take pages as they need them. `state` covers each layer's gathered slots and then
        the new tokens. A token that finds its head or the pool full is not written and counts in
        `overflowed`.
        """
        capacity = self.capacity
        old = {name: union[:, :, :, :capacity] for name, union in state.slots.items()}
        cache = dataclasses.replace(
            self,
            policy_state=State(
                slots={
                    name: self._scatter_slots(pool, old[name])
                    for name, pool in self.policy_state.slots.items()
                },
                layer=state.layer,
            ),
        )
        valid = jnp.broadcast_to((positions >= 0)[None, :, None], keys.shape[:4])
        new = {name: union[:, :, :, capacity:] for name, union in state.slots.items()}
        return cache._write_behind(valid, keys, values, positions, new)

    def keep(
        self,
        keep: Bool[Array, "L B K U"],
        keys: Float[Array, "L B K T D"],
        values: Float[Array, "L B K T D"],
        positions: Int[Array, "B T"],
        state: State,
        absorb: Absorb | None = None,
    ) -> PagedCache:
        """Keeps the marked entries of the union of slots and new tokens, U = S + T, compacted.

        First each layer's old entries are compacted, one layer's union alive at a time, which
        only ever returns pages; then the new tokens that stay are written behind them. So no
        layer waits for pages that a later one still holds. `state` and `absorb` are as in
        `PaddedCache.keep`.
        """
        if absorb is None and in_place((self.keys, self.values), self.page_table):
            return self._keep_in_place(keep, keys, values, positions, state)
        capacity = self.capacity
        spread = jnp.broadcast_to(positions[:, None], keys.shape[1:4])

        def one_layer(cache: PagedCache, layer: Array) -> tuple[PagedCache, tuple[Array, Array]]:
            indices, lengths = kept_indices(keep[layer, :, :, :capacity], capacity)
            view = (cache.page_table[layer], cache.lengths[layer])
            held = cache.dense(view)
            new_keys, new_values = keys[layer], values[layer]
            if absorb is not None:
                union = join(held, (new_keys, new_values, spread))
                all_keys, all_values = absorb(layer, *union)
                held = (all_keys[:, :, :capacity], all_values[:, :, :capacity], held[2])
                new_keys, new_values = all_keys[:, :, capacity:], all_values[:, :, capacity:]
            slots = {
                name: gather_slots(union[layer, :, :, :capacity], indices)
                for name, union in state.slots.items()
            }
            kept_keys, kept_values, kept_positions = (gather_slots(a, indices) for a in held)
            cache = cache._replace_layer(
                layer, lengths, kept_keys, kept_values, kept_positions, slots
            )
            return cache, (new_keys, new_values)

        start = dataclasses.replace(
            self, policy_state=State(slots=self.policy_state.slots, layer=state.layer)
        )
        layers = jnp.arange(self.num_layers, dtype=jnp.int32)
        cache, (new_keys, new_values) = lax.scan(one_layer, start, layers)
        new = {name: union[:, :, :, capacity:] for name, union in state.slots.items()}
        return cache._write_behind(keep[:, :, :, capacity:], new_keys, new_values, positions, new)

    def _keep_in_place(
        self,
        keep: Bool[Array, "L B K U"],
        keys: Float[Array, "L B K T D"],
        values: Float[Array, "L B K T D"],
        positions: Int[Array, "B T"],
        state: State,
    ) -> PagedCache:
        """As `keep`: old entries move to the front of the pages that their head holds already."""
        capacity = self.capacity
        indices, lengths = kept_indices(keep[:, :, :, :capacity], capacity)
        # What is behind a head's length is never read, so nothing has to be cleared there.
        kept_keys, kept_values = compact(
            (self.keys, self.values), indices, lengths, held=lengths, table=self.page_table
        )
        row = jnp.arange(self.batch)[None, :, None, None]
        held = self.positions[row, jnp.maximum(self.page_table, 0)]  # [L, B, K, M, P]
        held = gather_slots(held.reshape(*lengths.shape, capacity), indices)
        slots = {
            name: gather_slots(union[:, :, :, :capacity], indices)
            for name, union in state.slots.items()
        }
        cache = dataclasses.replace(
            self,
            keys=kept_keys,
            values=kept_values,
            positions=self._scatter_slots(self.positions, held),
            lengths=lengths,
            policy_state=State(
                slots={
                    name: self._scatter_slots(pool, slots[name])
                    for name, pool in self.policy_state.slots.items()
                },
                layer=state.layer,
            ),
        )._return_pages()
        new = {name: union[:, :, :, capacity:] for name, union in state.slots.items()}
        return cache._write_behind(keep[:, :, :, capacity:], keys, values, positions, new)

    def _return_pages(self) -> PagedCache:
        """Gives back the pages behind each head's length; only numbers of pages move."""
        ordinal = jnp.arange(self.page_table.shape[3], dtype=jnp.int32)[None, None, None]
        spare = (self.page_table >= 0) & (ordinal * self.page_size >= self.lengths[..., None])
        by_row = jnp.moveaxis(spare, 1, 0).reshape(self.batch, -1)
        pages = jnp.moveaxis(self.page_table, 1, 0).reshape(self.batch, -1)
        place = self.free_count[:, None] + jnp.cumsum(by_row, axis=1, dtype=jnp.int32) - 1
        place = jnp.where(by_row, place, self.free.shape[1])
        row = jnp.arange(self.batch)[:, None]
        return dataclasses.replace(
            self,
            page_table=jnp.where(spare, -1, self.page_table),
            free=self.free.at[row, place].set(pages, mode="drop", unique_indices=True),
            free_count=self.free_count + jnp.sum(by_row, axis=1, dtype=jnp.int32),
        )

    def fill(
        self,
        keys: Float[Array, "L B K C D"],
        values: Float[Array, "L B K C D"],
        positions: Int[Array, "L B K C"],
        lengths: Int[Array, "L B K"],
        next_position: Int[Array, " B"],
        state: State,
    ) -> PagedCache:
        """An empty cache filled with compacted entries, `lengths` of them in each head."""

        def fit(array: Array) -> Array:
            short = max(0, self.capacity - array.shape[3])
            widths = [(0, 0)] * 3 + [(0, short)] + [(0, 0)] * (array.ndim - 4)
            return jnp.pad(array, widths)[:, :, :, : self.capacity]

        cache = self._take_pages(lengths)
        return dataclasses.replace(
            cache,
            keys=cache._scatter_slots(self.keys, fit(keys)),
            values=cache._scatter_slots(self.values, fit(values)),
            positions=cache._scatter_slots(self.positions, fit(positions)),
            lengths=lengths,
            next_position=next_position,
            policy_state=State(
                slots={
                    name: cache._scatter_slots(pool, fit(state.slots[name]))
                    for name, pool in self.policy_state.slots.items()
                },
                layer=state.layer,
            ),
        )

    def _write_behind(
        self,
        marked: Bool[Array, "L B K T"],
        keys: Float[Array, "L B K T D"],
        values: Float[Array, "L B K T D"],
        positions: Int[Array, "B T"],
        slots: dict[str, Array],
    ) -> PagedCache:
        """The marked ones of T new tokens behind each head's slots, on new pages where needed."""
        page = self.page_size
        wanted = self.lengths + jnp.sum(marked, axis=-1, dtype=jnp.int32)
        cache = self._take_pages(jnp.minimum(wanted, self.capacity))
        held = jnp.sum(cache.page_table >= 0, axis=-1, dtype=jnp.int32) * page
        lengths = jnp.minimum(wanted, held)

        place = self.lengths[..., None] + jnp.cumsum(marked, axis=-1, dtype=jnp.int32) - 1
        writable = marked & (place < lengths[..., None])
        ordinal = jnp.clip(place // page, 0, cache.page_table.shape[3] - 1)
        identity = jnp.take_along_axis(cache.page_table, ordinal, axis=3)
        identity = jnp.where(writable, identity, self.keys.shape[1])
        index = (jnp.arange(self.batch)[None, :, None, None], identity, place % page)

        def write(pool: Array, new: Array) -> Array:
            return pool.at[index].set(new.astype(pool.dtype), mode="drop", unique_indices=True)

        added = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
        return dataclasses.replace(
            cache,
            keys=write(self.keys, keys),
            values=write(self.values, values),
            positions=write(
                self.positions, jnp.broadcast_to(positions[None, :, None], marked.shape)
            ),
            lengths=lengths,
            next_position=self.next_position + added,
            overflowed=self.overflowed + jnp.max(wanted - lengths, axis=(0, 2)),
            policy_state=State(
                slots={
                    name: write(pool, slots[name]) for name, pool in self.policy_state.slots.items()
                },
                layer=self.policy_state.layer,
            ),
        )

    def _take_pages(self, lengths: Int[Array, "L B K"]) -> PagedCache:
        """Gives every head the pages that `lengths` slots need, beside those it holds.

        When the pool runs out, later heads (by layer, then head) get none.
        """
        ordinal = jnp.arange(self.page_table.shape[3], dtype=jnp.int32)[None, None, None]
        need = (self.page_table < 0) & (ordinal * self.page_size < lengths[..., None])
        by_row = jnp.moveaxis(need, 1, 0).reshape(self.batch, -1)
        place = jnp.cumsum(by_row, axis=1, dtype=jnp.int32) - 1
        from_top = self.free_count[:, None] - 1 - place
        granted = by_row & (from_top >= 0)
        identity = jnp.take_along_axis(self.free, jnp.maximum(from_top, 0), axis=1)
        identity = jnp.where(granted, identity, -1)
        layers, batch, heads, pages = self.page_table.shape
        identity = jnp.moveaxis(identity.reshape(batch, layers, heads, pages), 0, 1)
        return dataclasses.replace(
            self,
            page_table=jnp.where(need, identity, self.page_table),
            free_count=self.free_count - jnp.sum(granted, axis=1, dtype=jnp.int32),
        )

    def _replace_layer(
        self,
        layer: Array,
        lengths: Int[Array, "B K"],
        keys: Array,
        values: Array,
        positions: Array,
        slots: dict[str, Array],
    ) -> PagedCache:
        """One layer's slots [B, K, S, ...] exchanged, its old pages returned to the pool first."""
        batch, heads, pages = self.page_table.shape[1:]
        row = jnp.arange(batch)[:, None]
        old = self.page_table[layer].reshape(batch, -1)
        returned = old >= 0
        place = self.free_count[:, None] + jnp.cumsum(returned, axis=1, dtype=jnp.int32) - 1
        place = jnp.where(returned, place, self.free.shape[1])
        free = self.free.at[row, place].set(old, mode="drop", unique_indices=True)
        count = self.free_count + jnp.sum(returned, axis=1, dtype=jnp.int32)

        ordinal = jnp.arange(pages, dtype=jnp.int32)[None, None]
        need = (ordinal * self.page_size < lengths[..., None]).reshape(batch, -1)
        from_top = count[:, None] - jnp.cumsum(need, axis=1, dtype=jnp.int32)
        identity = jnp.take_along_axis(free, jnp.maximum(from_top, 0), axis=1)
        identity = jnp.where(need & (from_top >= 0), identity, -1).reshape(batch, heads, pages)

        def write(pool: Array, dense: Array) -> Array:
            paged = dense.reshape(batch, heads, pages, self.page_size, *dense.shape[3:])
            target = jnp.where(identity >= 0, identity, pool.shape[1])
            index = (jnp.arange(batch)[:, None, None], target)
            return pool.at[index].set(paged.astype(pool.dtype), mode="drop", unique_indices=True)

        return dataclasses.replace(
            self,
            keys=write(self.keys, keys),
            values=write(self.values, values),
            positions=write(self.positions, positions),
            page_table=self.page_table.at[layer].set(identity),
            lengths=self.lengths.at[layer].set(lengths),
            free=free,
            free_count=count - jnp.sum(identity >= 0, axis=(1, 2), dtype=jnp.int32),
            policy_state=State(
                slots={
                    name: write(pool, slots[name]) for name, pool in self.policy_state.slots.items()
                },
                layer=self.policy_state.layer,
            ),
        )

    def _scatter_slots(self, pool: Array, dense: Array) -> Array:
        """Writes gathered slots [L, B, K, S, ...] back to the pages their heads hold."""
        layers, batch, heads, pages = self.page_table.shape
        paged = dense.reshape(layers, batch, heads, pages, self.page_size, *dense.shape[4:])
        target = jnp.where(self.page_table >= 0, self.page_table, pool.shape[1])
        index = (jnp.arange(batch)[None, :, None, None], target)
        return pool.at[index].set(paged.astype(pool.dtype), mode="drop", unique_indices=True)
