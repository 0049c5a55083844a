"""What one layer shows to the policy that decides what stays in its cache."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int

MODALITY = "modality"  # slot array of caches that were asked for it; policies never see it
MEMORY = "memory."  # how the names of a remainder's layer arrays begin
NEWEST = "memory.newest"  # int32: the largest position that a memory holds, -1 where it is empty


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """A policy's own memory for one layer; stacked over layers it is `cache.policy_state`.

    `slots` follow their entry: they are compacted, appended and evicted exactly as the keys are.
    `layer` arrays belong to the row as a whole; those of a remainder that remembers begin with
    `MEMORY`. In a cache, `slots` may also hold `MODALITY`, which is no policy's
    (`kvjax.cache.modality`).
    """

    slots: dict[str, Array] = dataclasses.field(default_factory=dict)  # [B, K, S, ...]
    layer: dict[str, Array] = dataclasses.field(default_factory=dict)  # [B, ...]

    @property
    def memory(self) -> dict[str, Array]:
        """What a remainder remembers of evicted entries."""
        return {name: a for name, a in self.layer.items() if name.startswith(MEMORY)}

    @property
    def own(self) -> dict[str, Array]:
        """The layer arrays that are not a remainder's."""
        return {name: a for name, a in self.layer.items() if not name.startswith(MEMORY)}

    def without_policy(self) -> State:
        """What stays once the policy evicts no more: modalities and memory."""
        kept = {name: self.slots[name] for name in self.slots.keys() & {MODALITY}}
        return State(slots=kept, layer=self.memory)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """One layer after attention: every entry that competes, and what its policy asked to see.

    The S slots are the entries cached before this call followed by this call's T new tokens, in
    position order with empty slots (position -1) anywhere. Optional fields are None unless the
    scorer names them in `needs`.
    """

    keys: Float[Array, "B K S D"]  # after RoPE at their true positions
    values: Float[Array, "B K S D"]
    positions: Int[Array, "B K S"]  # absolute token position, -1 where the slot is empty
    next_position: Int[Array, " B"]  # tokens seen by each row, this call included
    layer: Int[Array, ""]  # index of this layer
    rope_frequencies: Float[Array, " D/2"]  # radians per position
    # "queries": the last `Scorer.window` queries of each row, oldest first, after RoPE; rows with
    # fewer tokens are filled at the front with position -1.
    queries: Float[Array, "B H W D"] | None = None
    query_positions: Int[Array, "B W"] | None = None
    # Everything below covers this call's T tokens only; padding has position -1.
    new_positions: Int[Array, "B T"] | None = None
    queries_pre_rope: Float[Array, "B H T D"] | None = None
    hidden: Float[Array, "B T E"] | None = None  # normed input of the attention block
    # "column_attention": sum over this call's queries of their softmax weight on each slot.
    column_attention: Float[Array, "B H S"] | None = None
    output_projection: Float[Array, "H D E"] | None = None  # W_O, one slice per query head
    # Mean entries per head this layer will keep; None when nothing is evicted in this call.
    budget: Int[Array, " B"] | None = None

    @property
    def valid(self) -> Array:
        """[B, K, S] bool: the slot holds an entry."""
        return self.positions >= 0

    @property
    def num_groups(self) -> int:
        """Query heads per KV head; needs `queries` or `column_attention`."""
        heads = self.queries if self.queries is not None else self.column_attention
        if heads is None:
            raise ValueError("num_groups needs 'queries' or 'column_attention' in Scorer.needs")
        return heads.shape[1] // self.keys.shape[1]
