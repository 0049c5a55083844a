"""A cache of fixed shapes with the same capacity for every head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.gather_compact import gather_slots
from kernels_pallas.select import kept_indices
from kvjax.policies.observation import State


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

    @property
    def num_layers(self) -> int:
        return self.keys.shape[0]

    @property
    def batch(self) -> int:
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

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
        layers, batch, heads, count = keys.shape[:4]
        valid = positions >= 0
        slot = self.lengths[..., None] + jnp.arange(count, dtype=jnp.int32)[None, None, None]
        slot = jnp.where(valid[None, :, None], slot, self.capacity)
        index = (
            jnp.arange(layers)[:, None, None, None],
            jnp.arange(batch)[None, :, None, None],
            jnp.arange(heads)[None, None, :, None],
            slot,
        )

        def write(into: Array, new: Array) -> Array:
            return into.at[index].set(new.astype(into.dtype), mode="drop", unique_indices=True)

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
    ) -> PaddedCache:
        """Keeps the marked entries of the union of slots and new tokens, U = S + T, compacted.

        Layer by layer in place: one layer's union is alive at a time. `state.slots` covers the
        union, `state.layer` is complete.
        """
        capacity = self.capacity
        rows = jnp.broadcast_to(positions[:, None], (*keys.shape[1:4],))

        def one_layer(layer: Array, cache: PaddedCache) -> PaddedCache:
            indices, lengths = kept_indices(keep[layer], capacity)

            def compact(into: Array, new: Array, fill: int = 0) -> Array:
                union = jnp.concatenate([into[layer], new.astype(into.dtype)], axis=2)
                return into.at[layer].set(gather_slots(union, indices, fill))

            slots = {
                name: into.at[layer].set(gather_slots(state.slots[name][layer], indices))
                for name, into in cache.policy_state.slots.items()
            }
            return dataclasses.replace(
                cache,
                keys=compact(cache.keys, keys[layer]),
                values=compact(cache.values, values[layer]),
                positions=compact(cache.positions, rows, fill=-1),
                lengths=cache.lengths.at[layer].set(lengths),
                policy_state=State(slots=slots, layer=cache.policy_state.layer),
            )

        start = dataclasses.replace(
            self,
            next_position=self.next_position + jnp.sum(positions >= 0, axis=1, dtype=jnp.int32),
            policy_state=State(slots=self.policy_state.slots, layer=state.layer),
        )
        return lax.fori_loop(0, self.num_layers, one_layer, start)


def nbytes(cache: Any) -> int:
    """Bytes of all arrays of a cache (or any pytree of arrays), the sum of their sizes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def map_rows(function: Any, *caches: PaddedCache) -> PaddedCache:
    """Applies `function(*arrays, axis)` to every array, `axis` being its batch axis."""
    per_row = ("next_position", "overflowed")
    fields = {}
    for field in dataclasses.fields(PaddedCache):
        axis = 0 if field.name in per_row else 1
        fields[field.name] = jax.tree.map(
            lambda *arrays, axis=axis: function(*arrays, axis),
            *(getattr(cache, field.name) for cache in caches),
        )
    return PaddedCache(**fields)


def stack_rows(caches: list[PaddedCache] | tuple[PaddedCache, ...]) -> PaddedCache:
    """One cache whose rows are the rows of all, in order.

    Raises:
      ValueError: the caches differ in anything but the number of rows.
    """
    shapes = {
        (jax.tree.structure(cache), *cache.keys.shape[:1], *cache.keys.shape[2:]): None
        for cache in caches
    }
    if len(shapes) != 1:
        found = "; ".join(str(cache.keys.shape) for cache in caches)
        raise ValueError(f"stack_rows: capacities, layers, heads and state must agree, got {found}")
    return map_rows(lambda *arrays: jnp.concatenate(arrays[:-1], axis=arrays[-1]), *caches)


def take_rows(cache: PaddedCache, rows: Any) -> PaddedCache:
    """The given rows of a cache, e.g. `take_rows(cache, [0, 0, 0])` for three copies of row 0."""
    index = jnp.asarray(rows)
    return map_rows(lambda array, axis: jnp.take(array, index, axis=axis), cache)
