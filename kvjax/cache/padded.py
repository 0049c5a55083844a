"""A cache of fixed shapes with the same capacity for every head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.gather_compact import compact, gather_slots, in_place
from kernels_pallas.ragged_decode import decode_attention, decode_mass
from kernels_pallas.select import kept_indices
from kvjax.policies.observation import State

type Absorb = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
type Entries = tuple[Array, Array, Array]  # keys, values, positions
type View = tuple[Array, Array, Array, Array]  # keys, values, positions, lengths


def join(slots: Entries, new: Entries) -> Entries:
    """Entries of one layer followed by new ones, in the dtype of the first."""
    pairs = zip(slots, new, strict=True)
    keys, values, positions = (jnp.concatenate([a, b.astype(a.dtype)], axis=2) for a, b in pairs)
    return keys, values, positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedCache:
    """Keys and values of every layer; a pytree whose shapes never change.

    Filled slots stand at the front in position order. Keys are stored after RoPE at their true
    positions. `next_position` counts the tokens a row has seen, not the slots it uses.
    """

    keys: Float[Array, "L B K S D"]
    values: Float[Array, "L B K S D"]
    positions: Int[Array, "L B K S"]  # -1 where empty
    lengths: Int[Array, "L B K"]  # filled slots
    next_position: Int[Array, " B"]
    overflowed: Int[Array, " B"]  # tokens refused because every slot of a head was full
    policy_state: State = dataclasses.field(default_factory=State)

    @classmethod
    def empty(
        cls,
        *,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: Any,
        policy_state: State | None = None,
    ) -> PaddedCache:
        """A cache of `capacity` slots per head with nothing in it."""
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: allowed are integers >= 1")
        heads = (num_layers, batch, num_kv_heads)
        return cls(
            keys=jnp.zeros((*heads, capacity, head_dim), dtype),
            values=jnp.zeros((*heads, capacity, head_dim), dtype),
            positions=jnp.full((*heads, capacity), -1, jnp.int32),
            lengths=jnp.zeros(heads, jnp.int32),
            next_position=jnp.zeros(batch, jnp.int32),
            overflowed=jnp.zeros(batch, jnp.int32),
            policy_state=State() if policy_state is None else policy_state,
        )

    row_axes: ClassVar[dict[str, int]] = {
        "keys": 1,
        "values": 1,
        "positions": 1,
        "lengths": 1,
        "slots": 1,
        "layer": 1,
    }

    @property
    def num_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[-1]

    @property
    def capacity(self) -> int:
        """Slots of each head."""
        return self.keys.shape[3]

    @property
    def views(self) -> View:
        """What a scan over layers reads, leading axis L."""
        return self.keys, self.values, self.positions, self.lengths

    def room(self) -> Int[Array, " B"]:
        """Tokens that every head of a row can still take."""
        return self.capacity - jnp.max(self.lengths, axis=(0, 2))

    def attend(
        self,
        view: View,
        queries: Float[Array, "B H Q D"],
        query_positions: Int[Array, "B Q"],
        window: int | Int[Array, ""],
    ) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"]]:
        """Attention of one layer over its slots: output and log-sum-exp."""
        keys, values, positions, lengths = view
        return decode_attention(queries, keys, values, query_positions, positions, lengths, window)

    def attend_mass(
        self,
        view: View,
        queries: Float[Array, "B H Q D"],
        query_positions: Int[Array, "B Q"],
        others: Float[Array, "B H Q"],
        window: int | Int[Array, ""],
    ) -> tuple[Float[Array, "B H Q D"], Float[Array, "B H Q"], Float[Array, "B H S"]]:
        """`attend`, and the weights that each slot gets beside entries of log-sum-exp `others`."""
        keys, values, positions, lengths = view
        return decode_mass(
            queries, keys, values, query_positions, positions, lengths, others, window
        )

    def dense(
        self, view: View
    ) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"], Int[Array, "B K S"]]:
        """Keys, values and positions of one layer's slots."""
        return view[:3]

    def dense_slots(self, view: View, index: Array) -> dict[str, Array]:
        """The policy's slot arrays of layer `index`."""
        del view
        return {name: array[index] for name, array in self.policy_state.slots.items()}

    def append(
        self,
        keys: Float[Array, "L B K T D"],
        values: Float[Array, "L B K T D"],
        positions: Int[Array, "B T"],
        state: State,
    ) -> PaddedCache:
        """Writes the call's valid tokens behind each head's last filled slot, in one scatter.

        `positions` is -1 for padding, which stands behind the row's tokens. `state` covers the
        slots and then the new tokens. A token that finds its head full is not written and counts
        in `overflowed`.
        """
        valid = positions >= 0
        place = jnp.arange(keys.shape[3], dtype=jnp.int32)[None, None, None]
        slot = jnp.where(valid[None, :, None], self.lengths[..., None] + place, self.capacity)

        def write(into: Array, new: Array) -> Array:
            return self._write(into, slot, new)

        added = jnp.sum(valid, axis=1, dtype=jnp.int32)
        wanted = self.lengths + added[None, :, None]
        lengths = jnp.minimum(wanted, self.capacity)
        new_positions = jnp.broadcast_to(positions[None, :, None], slot.shape)
        return dataclasses.replace(
            self,
            keys=write(self.keys, keys),
            values=write(self.values, values),
            positions=write(self.positions, new_positions),
            lengths=lengths,
            next_position=self.next_position + added,
            overflowed=self.overflowed + jnp.max(wanted - lengths, axis=(0, 2)),
            policy_state=State(
                slots={
                    name: write(union[:, :, :, : self.capacity], union[:, :, :, self.capacity :])
                    for name, union in state.slots.items()
                },
                layer=state.layer,
            ),
        )

    def keep(
        self,
        keep: Bool[Array, "L B K U"],
        keys: Float[Array, "L B K T D"],
        values: Float[Array, "L B K T D"],
        positions: Int[Array, "B T"],
        state: State,
        absorb: Absorb | None = None,
    ) -> PaddedCache:
        """Keeps the marked entries of the union of slots and new tokens, U = S + T, compacted.

        Layer by layer in place: one layer's union is alive at a time. `state.slots` covers the
        union, `state.layer` is complete. `absorb(layer, keys, values, positions)` may change the
        union's keys and values before the evicted entries are lost. Without it, where there is a
        kernel for it, keys and values move within the cache and no union is made.
        """
        if absorb is None and in_place((self.keys, self.values)):
            return self._keep_in_place(keep, keys, values, positions, state)
        spread = jnp.broadcast_to(positions[:, None], keys.shape[1:4])

        def one_layer(layer: Array, cache: PaddedCache) -> PaddedCache:
            indices, lengths = kept_indices(keep[layer], cache.capacity)
            view = (cache.keys[layer], cache.values[layer], cache.positions[layer])
            union = join(view, (keys[layer], values[layer], spread))
            if absorb is not None:
                union = (*absorb(layer, *union), union[2])
            slots = {
                name: into.at[layer].set(gather_slots(state.slots[name][layer], indices))
                for name, into in cache.policy_state.slots.items()
            }
            return dataclasses.replace(
                cache,
                keys=cache.keys.at[layer].set(gather_slots(union[0], indices)),
                values=cache.values.at[layer].set(gather_slots(union[1], indices)),
                positions=cache.positions.at[layer].set(gather_slots(union[2], indices, fill=-1)),
                lengths=cache.lengths.at[layer].set(lengths),
                policy_state=State(slots=slots, layer=cache.policy_state.layer),
            )

        start = dataclasses.replace(
            self,
            next_position=self.next_position + jnp.sum(positions >= 0, axis=1, dtype=jnp.int32),
            policy_state=State(slots=self.policy_state.slots, layer=state.layer),
        )
        return lax.fori_loop(0, self.num_layers, one_layer, start)

    def _keep_in_place(
        self,
        keep: Bool[Array, "L B K U"],
        keys: Float[Array, "L B K T D"],
        values: Float[Array, "L B K T D"],
        positions: Int[Array, "B T"],
        state: State,
    ) -> PaddedCache:
        """As `keep`: old entries move to the front, then the new ones are written behind them."""
        capacity = self.capacity
        indices, lengths = kept_indices(keep, capacity)
        marked = keep[:, :, :, capacity:]
        old = jnp.sum(keep[:, :, :, :capacity], axis=-1, dtype=jnp.int32)
        kept = compact((self.keys, self.values), indices, old, held=self.lengths)
        slot = old[..., None] + jnp.cumsum(marked, axis=-1, dtype=jnp.int32) - 1
        slot = jnp.where(marked, slot, capacity)
        spread = jnp.broadcast_to(positions[None, :, None], marked.shape)
        union = jnp.concatenate([self.positions, spread], axis=-1)
        return dataclasses.replace(
            self,
            keys=self._write(kept[0], slot, keys),
            values=self._write(kept[1], slot, values),
            positions=gather_slots(union, indices, fill=-1),
            lengths=lengths,
            next_position=self.next_position + jnp.sum(positions >= 0, axis=1, dtype=jnp.int32),
            policy_state=State(
                slots={name: gather_slots(a, indices) for name, a in state.slots.items()},
                layer=state.layer,
            ),
        )

    def _write(self, into: Array, slot: Int[Array, "L B K T"], new: Array) -> Array:
        """`new` [L, B, K, T, ...] at each head's slots; what is at `capacity` or behind is not.

        Mapped over the heads, so that each device writes those that it holds: axes given as
        indices are not partitioned, and every device gets what all of them write.
        """

        def one_head(into: Array, slot: Array, new: Array) -> Array:
            return into.at[slot].set(new, mode="drop", unique_indices=True)

        heads = jax.vmap(jax.vmap(jax.vmap(one_head)))
        written: Array = heads(into, slot, new.astype(into.dtype))
        return written
