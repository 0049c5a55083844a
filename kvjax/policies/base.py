"""A policy is a composition: Scorer x Allocator x Protection x Schedule x Remainder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.policies.observation import Observation, State
from kvjax.whole import check_whole

NEEDS = frozenset(
    {
        "queries",
        "queries_pre_rope",
        "hidden",
        "column_attention",
        "output_projection",
        "replay",
    }
)
type Params = Any
type Granularity = Literal["kv", "query"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protection:
    """Entries that rank before every score: the first `sinks` and the last `recent` tokens.

    `recent` as a float is a fraction of the head's budget (H2O protects half of it). When the
    budget cannot hold all protected entries, sinks come first, then the newest.
    """

    sinks: int = 4
    recent: int | float = 0

    def __post_init__(self) -> None:
        check_whole("sinks", self.sinks, 0)
        if self.recent < 0 or (isinstance(self.recent, float) and self.recent > 1):
            raise ValueError(
                f"recent={self.recent}: allowed are integers >= 0 or a fraction of the budget "
                "in [0, 1]"
            )

    def recent_tokens(self, budget: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The number of newest tokens protected under `budget` entries."""
        if isinstance(self.recent, float):
            return jnp.floor(self.recent * budget.astype(jnp.float32)).astype(jnp.int32)
        return jnp.full_like(budget, self.recent)

    def rank(
        self,
        positions: Int[Array, "B K S"],
        next_position: Int[Array, " B"],
        budget: Int[Array, "B K"],
    ) -> Int[Array, "B K S"]:
        """0 for unprotected entries; among protected ones a larger rank is kept first.

        Ranks stay below 2**23: the largest protected position is 8,388,606.
        """
        recent = self.recent_tokens(budget)[..., None]
        is_recent = positions >= next_position[:, None, None] - recent
        is_sink = (positions >= 0) & (positions < self.sinks)
        newest = jnp.where(is_recent & (positions >= 0), positions + 1, 0)
        return jnp.where(is_sink, jnp.int32(2**23 - 1), newest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When entries are evicted.

    prefill "whole": each layer attends to the full prompt, then leaves the layer compacted.
    prefill "chunked": chunk by chunk against the evicted cache; memory is budget + chunk.
    decode_interval None: generated tokens are appended beside the budget.
    decode_interval tau: a row that has filled the tau slots above its budget is cut back to it.
    """

    prefill: Literal["whole", "chunked"] = "whole"
    chunk: int = 512
    decode_interval: int | None = None

    def __post_init__(self) -> None:
        if self.prefill not in ("whole", "chunked"):
            raise ValueError(f"prefill={self.prefill!r}: allowed are 'whole' and 'chunked'")
        check_whole("chunk", self.chunk, 1)
        if self.decode_interval is not None:
            check_whole("decode_interval", self.decode_interval, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateField:
    """One array of a policy's state: shape beyond [B, K, S] (slots) or [B] (layer)."""

    shape: tuple[int, ...] = ()
    dtype: Any = jnp.float32
    fill: float | int = 0.0


def new_state(fields: dict[str, StateField], lead: Sequence[int]) -> dict[str, Array]:
    """Arrays of the given fields at their fill value, with leading axes `lead`."""
    return {
        name: jnp.full((*lead, *field.shape), field.fill, field.dtype)
        for name, field in fields.items()
    }


class Scorer:
    """Ranks entries by what they are worth; a subclass is a frozen dataclass in a file of its own.

    `update` runs in every call (prefill, chunk, decode step) and keeps the state current; `score`
    runs only when something is evicted. Both are pure functions of arrays of one layer. Scores
    are float32, larger is kept, and nothing crosses the batch axis. Invalid slots may hold any
    score: selection never takes them.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    window: int = 0  # how many of the last queries the scorer wants to see
    stride: int = 1  # `update` runs in every such layer; those between take its state over

    def protection(self) -> Protection:
        """The method's own protection; sinks are on unless the paper says otherwise."""
        return Protection(sinks=4)

    def allocator(self) -> Allocator:
        return Uniform()

    def schedule(self) -> Schedule:
        return Schedule()

    def for_model(self, num_heads: int, head_dim: int) -> Scorer:
        """This scorer as the fields below ask for it, where their shapes depend on the model."""
        del num_heads, head_dim
        return self

    def slot_fields(self) -> dict[str, StateField]:
        """Per-entry state this scorer keeps; new entries start at `fill`."""
        return {}

    def layer_fields(self) -> dict[str, StateField]:
        """Per-row state this scorer keeps."""
        return {}

    def update(self, observation: Observation, params: Params, state: State) -> State:
        """State after this call; `state.slots` already has the call's new entries."""
        del observation, params
        return state

    def score(
        self, observation: Observation, params: Params, state: State
    ) -> Float[Array, "B K S"]:
        raise NotImplementedError


class Allocator:
    """Splits a budget of entries per head over layers and heads.

    Budgets are data; no shape depends on them. Where `crosses_layers` is False a layer can be
    split alone: `layer_budgets` before any score, then `head_budgets`. Where it is True only
    `allocate`, which sees every layer, knows the split.
    """

    crosses_layers: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()  # what `preference` reads, as in Scorer.needs
    window: int = 0

    def layer_budgets(
        self, budget: Int[Array, " B"], lengths: Int[Array, " B"], num_layers: int
    ) -> Int[Array, "L B"]:
        """Mean entries per head in each layer, known before any score."""
        del lengths
        return jnp.broadcast_to(budget, (num_layers, *budget.shape))

    def head_budgets(
        self,
        scores: Float[Array, "B K S"],
        valid: Array,
        rank: Int[Array, "B K S"],
        budget: Int[Array, " B"],
    ) -> Int[Array, "B K"]:
        """Entries for each head of one layer; `rank` is the protection's."""
        del valid, rank
        return jnp.broadcast_to(budget[:, None], scores.shape[:2])

    def preference(self, observation: Observation) -> Float[Array, " B"]:
        """What one layer reports to `allocate` about itself."""
        return jnp.zeros(observation.next_position.shape, jnp.float32)

    def allocate(
        self,
        scores: Float[Array, "L B K S"],
        valid: Bool[Array, "L B K S"],
        rank: Int[Array, "L B K S"],
        budget: Int[Array, " B"],
        lengths: Int[Array, " B"],
        preference: Float[Array, "L B"] | None = None,
    ) -> Int[Array, "L B K"]:
        """Entries for each head of every layer; `lengths` are the rows' tokens.

        The slots may be candidates only: the best `largest(...)` entries of each head.
        """
        del preference
        layers = self.layer_budgets(budget, lengths, scores.shape[0])
        return jax.vmap(self.head_budgets)(scores, valid, rank, layers)

    def largest(self, budget: int, length: int, num_layers: int, num_kv_heads: int) -> int:
        """The most entries any one head can get: the capacity a padded cache needs."""
        del length, num_layers, num_kv_heads
        return budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(Allocator):
    """Every head of every layer keeps the same number of entries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remainder:
    """What becomes of evicted entries. The base class drops them.

    A remainder may change the entries that stay (`apply`), or, where `remembers`, keep arrays of
    its own for each row and layer: `write` puts evicted entries into them, and `read` changes the
    attention of every token that is processed afterwards. The arrays live in the cache's layer
    state, outlive a policy that evicts once, and start at their field's fill. Then the policy's
    `params` are {"scorer": the scorer's own, "memory": the remainder's}, both stacked over layers.
    """

    remembers: ClassVar[bool] = False

    def layer_fields(
        self, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> dict[str, StateField]:
        """Per-row state: names that begin with `observation.MEMORY`, `NEWEST` among them."""
        del num_heads, num_kv_heads, head_dim
        return {}

    def check_params(
        self, params: Params, *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """Raises a ValueError where `params` are not this remainder's for such a model."""
        del params, num_layers, num_heads, num_kv_heads, head_dim

    def write(
        self,
        params: Params,
        memory: dict[str, Array],
        keys: Float[Array, "B K S D"],
        values: Float[Array, "B K S D"],
        positions: Int[Array, "B K S"],
        evicted: Bool[Array, "B K S"],
        rope_frequencies: Float[Array, " D/2"],
        *,
        aligned: bool,
        decays: bool,
    ) -> dict[str, Array]:
        """One layer's memory after a cut; `evicted` marks the entries it takes.

        With `aligned` every head has the same token in a slot. `decays` is False in the second
        step of one cut.
        """
        del params, keys, values, positions, evicted, rope_frequencies, aligned, decays
        return memory

    def read(
        self,
        params: Params,
        memory: dict[str, Array],
        queries: Float[Array, "B H T D"],
        queries_pre_rope: Float[Array, "B H T D"],
        attention: Float[Array, "B H T D"],
        lse: Float[Array, "B H T"],
    ) -> Float[Array, "B H T D"]:
        """What goes into the output projection; `attention` itself from an empty memory.

        `attention` is over the kept entries, `lse` the log-sum-exp of its logits.
        """
        del params, memory, queries, queries_pre_rope, lse
        return attention

    def apply(
        self,
        keys: Float[Array, "B K S D"],
        values: Float[Array, "B K S D"],
        positions: Int[Array, "B K S"],
        keep: Bool[Array, "B K S"],
        scores: Float[Array, "B K S"],
    ) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
        """Keys and values of one layer before compaction; only kept slots matter afterwards."""
        del positions, keep, scores
        return keys, values

    @property
    def changes_entries(self) -> bool:
        """Whether `apply` does anything."""
        return type(self).apply is not Remainder.apply


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A complete eviction method; static and hashable, so it can be a jit argument."""

    name: str
    scorer: Scorer | None  # None keeps everything
    protection: Protection = Protection()
    allocator: Allocator = Uniform()
    schedule: Schedule = Schedule()
    remainder: Remainder = Remainder()

    @property
    def needs(self) -> frozenset[str]:
        if self.scorer is None:
            return frozenset()
        return self.scorer.needs | self.allocator.needs

    @property
    def window(self) -> int:
        return 0 if self.scorer is None else max(self.scorer.window, self.allocator.window)

    @property
    def remembers(self) -> bool:
        """Whether a cache under this policy carries what its remainder remembers."""
        return self.scorer is not None and self.remainder.remembers

    def split(self, params: Params) -> tuple[Params, Params]:
        """The scorer's part of the policy's `params`, and the remainder's.

        Raises:
          ValueError: a remainder that remembers, and params of another form.
        """
        if not self.remembers:
            return params, None
        if not isinstance(params, dict) or params.keys() != {"scorer", "memory"}:
            given = sorted(params) if isinstance(params, dict) else params
            raise ValueError(
                f"policy {self.name!r} needs params {{'scorer': ..., 'memory': ...}}, given is "
                f"{given if isinstance(given, list) else type(given).__name__}: take them from "
                "kvjax.policy_params(model, policy)"
            )
        return params["scorer"], params["memory"]
