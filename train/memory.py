"""Training of a latent memory: every layer learns to give back what eviction took from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kernels_pallas.attention import NO_WINDOW, attention
from kvjax import compression
from kvjax.learned import memory as latent
from kvjax.learned import modules
from kvjax.learned.memory import Combine, Gate, MemoryConfig, Parameters, Phi
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy, Remainder, new_state
from kvjax.policies.latent_memory import LatentMemory
from kvjax.policies.registry import options
from train.documents import one_document
from train.passes import Layer, differentiated_at_once, frozen_pass
from train.recipe import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryTraining:
    """The regression of IndexMem (arXiv 2605.25475), layer by layer, on one document per row.

    The document is cut at a random place and the policy `name` evicts from what is before the cut,
    as in a prefill. With o the attention of the tokens behind the cut to everything, o_attn that to
    what is left,

    loss = mean over layers of |o - combine(o_attn, m)|^2 / stop_gradient |o - o_attn|^2

    The paper has the plain square; its sizes differ by orders of magnitude between layers. All
    hidden states are the full cache's. `selector_path` is the directory of the policy's trained
    module, where it needs one; None takes the one that ships.
    """

    name: str = "snapkv+memory"  # of the exported module, a policy with a memory
    selector_path: str | None = None
    features: int | None = None  # `MemoryConfig.size`
    phi: Phi = "compact"
    combine: Combine = "residual"
    gate: Gate = "mlp"
    normalise: bool = True
    least_evicted: float = 0.25  # share of the entries before the cut, drawn from between both
    most_evicted: float = 0.95
    first_cut: float = 0.4  # share of the document, drawn from between both
    last_cut: float = 0.9

    def __post_init__(self) -> None:
        for low, high in (("least_evicted", "most_evicted"), ("first_cut", "last_cut")):
            a, b = getattr(self, low), getattr(self, high)
            if not 0 < a <= b < 1:
                raise ValueError(
                    f"module.{low}={a}, module.{high}={b}: allowed: 0 < low <= high < 1"
                )
        self.check_name()
        self.memory  # noqa: B018 (checks its own fields)

    def check_name(self) -> None:
        known = [n for n in kvjax.policy_names() if kvjax.policy(n).remembers and n != "indexmem"]
        if self.name not in known:
            raise ValueError(f"module.name={self.name!r}: allowed: {', '.join(known)}")

    @property
    def memory(self) -> MemoryConfig:
        return MemoryConfig(
            size=self.features,
            phi=self.phi,
            combine=self.combine,
            gate=self.gate,
            normalise=self.normalise,
        )

    def selector(self) -> Policy:
        """The policy that evicts, without a memory."""
        given: dict[str, Any] = {}
        if self.selector_path is not None:
            if "path" not in options(self.name):
                raise ValueError(
                    f"module.selector_path={self.selector_path!r}: {self.name} needs no trained "
                    "module"
                )
            given = {"path": self.selector_path}
        return dataclasses.replace(kvjax.policy(self.name, **given), remainder=Remainder())


class MemoryRecipe:
    """A memory per layer under one policy; see `train.recipe.Recipe`."""

    def __init__(self, config: MemoryTraining, length: int):
        del length
        self.config, self.selector = config, config.selector()

    def init(self, model: Decoder, key: Array) -> Parameters:
        return init_for(self.config.memory, model, key)

    def axes(self, params: Parameters) -> dict[str, tuple[str | None, ...]]:
        """Small arrays: they stand whole everywhere."""
        return {name: (None,) * array.ndim for name, array in params.items()}

    def fixed(self, model: Decoder) -> Any:
        """The arrays of the policy that evicts."""
        return kvjax.policy_params(model, self.selector)

    def loss(
        self, params: Parameters, model: Decoder, batch: Batch, key: Array, fixed: Any
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        return memory_loss(self.config, self.selector, fixed, params, model, batch, key)

    def export(
        self, params: Parameters, model: Decoder, directory: Path, training: Mapping[str, Any]
    ) -> None:
        save(self.config.name, self.config.memory, params, model, directory, training)


def init_for(config: MemoryConfig, model: Decoder, key: Array) -> Parameters:
    """A fresh memory beside every layer of the model."""
    return latent.init_memory(
        config,
        key,
        num_layers=model.config.num_layers,
        num_heads=model.config.num_heads,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )


def save(
    name: str,
    config: MemoryConfig,
    params: Parameters,
    model: Decoder,
    directory: Path,
    training: Mapping[str, Any],
) -> None:
    """Writes a memory as `kvjax.load_policy` reads it."""
    card = modules.Card(
        module=name,
        kind="memory",
        options=dataclasses.asdict(config),
        backbone=str(training.get("model", "")),
        fingerprints=modules.fingerprints(model),
        training=training,
    )
    modules.save_module(directory, params, card)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Documents that are cut, and what a policy left of what is before the cut."""

    batch: Batch  # one document per row
    positions: Int[Array, "B T"]  # -1 for padding
    behind: Bool[Array, "B T"]  # tokens behind the cut
    kept: Bool[Array, "L B K T"]  # of those before it


def cut_documents(
    config: MemoryTraining,
    selector: Policy,
    selector_params: Any,
    model: Decoder,
    batch: Batch,
    key: Array,
    evicted: Float[Array, ""] | None = None,
) -> Cut:
    """One document of every row, cut and evicted at random; `evicted` fixes the share."""
    at = jax.random.split(key, 3)
    found, lengths = one_document(batch, at[0])
    tokens = found["tokens"]
    rows = lengths.shape
    share = jax.random.uniform(at[1], rows, minval=config.first_cut, maxval=config.last_cut)
    cut = jnp.maximum(jnp.int32(1), (share * lengths.astype(jnp.float32)).astype(jnp.int32))
    drawn = jax.random.uniform(at[2], rows, minval=config.least_evicted, maxval=config.most_evicted)
    gone = drawn if evicted is None else jnp.broadcast_to(evicted, rows)
    budget = jnp.maximum(jnp.int32(1), ((1.0 - gone) * cut.astype(jnp.float32)).astype(jnp.int32))
    kept = lax.stop_gradient(kept_entries(selector, selector_params, model, tokens, cut, budget))

    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    there = index < lengths[:, None]
    document = {
        "tokens": tokens,
        "segments": jnp.where(there, 0, -1).astype(jnp.int32),
        "positions": jnp.where(there, index, 0),
    }
    return Cut(
        batch=document,
        positions=jnp.where(there, index, -1),
        behind=there & (index >= cut[:, None]),
        kept=kept,
    )


def layer_error(
    config: MemoryConfig,
    params: Parameters,
    layer: Layer,
    kept: Bool[Array, "B K T"],
    cut: Cut,
    rope_frequencies: Float[Array, " D/2"],
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """|o - combine(o_attn, m)|^2, |o - o_attn|^2, and the mean weight of what is read.

    Squares are summed over the tokens behind the cut. The first is differentiated at once.
    """
    target, behind = layer.attention.astype(jnp.float32), cut.behind

    def apart(out: Array) -> Array:
        square = jnp.sum(jnp.square(target - out.astype(jnp.float32)), axis=(1, 3))
        return jnp.sum(jnp.where(behind, square, 0.0))

    def left(params: Parameters) -> tuple[Array, tuple[Array, Array]]:
        restored, weight, without = _restored(
            config, params, layer, kept, cut.positions, behind, rope_frequencies
        )
        mean = jnp.sum(jnp.where(behind, jnp.mean(weight, axis=1), 0.0))
        mean /= jnp.sum(behind).astype(jnp.float32)
        return apart(restored), (apart(without), mean)

    error, (lost, mean) = differentiated_at_once(left, params)
    return error, lost, mean


def memory_loss(
    config: MemoryTraining,
    selector: Policy,
    selector_params: Any,
    params: Parameters,
    model: Decoder,
    batch: Batch,
    key: Array,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss, and of every layer the gap closed and the mean weight of what is read.

    Gap closed is 1 - |o - combine(o_attn, m)|^2 / |o - o_attn|^2: 1 for a memory that restores the
    full cache, 0 for one that does nothing, below 0 for one that harms.
    """
    cut = cut_documents(config, selector, selector_params, model, batch, key)
    frequencies = jnp.asarray(model.rope_frequencies[0])

    def visit(layer: Layer, own: Any) -> tuple[Array, Array, Array, Array]:
        found = layer_error(config.memory, own[0], layer, own[1], cut, frequencies)
        return *found, layer.window >= NO_WINDOW

    _, (error, lost, weight, writes) = frozen_pass(model, cut.batch, visit, (params, cut.kept))
    counts = writes & (lost > 0)  # a sliding-window layer is never cut below its window
    ratio = jnp.where(counts, error / jnp.where(counts, lost, 1.0), 0.0)
    loss = jnp.sum(ratio) / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
    gap = jnp.where(counts, 1.0 - ratio, 0.0)
    return loss, {
        "gap_closed": 1.0 - loss,
        "gate": jnp.mean(weight),
        "gap_closed_by_layer": gap,
        "gate_by_layer": weight,
    }


def kept_entries(
    policy: Policy,
    params: Any,
    model: Decoder,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    budget: Int[Array, " B"],
) -> Bool[Array, "L B K T"]:
    """What the policy leaves of the first `lengths` tokens at `budget` entries per head."""
    width = tokens.shape[1]
    _, cache, seen = compression.observe(model, tokens, lengths, policies=(policy,))
    left = compression.compress(
        model, cache, seen, budget, policy=policy, capacity=width, params=params
    )
    assert isinstance(left, type(cache))
    found = jnp.where(left.positions >= 0, left.positions, width)  # empty slots fall off the end
    lead = found.shape[:3]
    flat = found.reshape(-1, found.shape[3])
    row = jnp.arange(flat.shape[0])[:, None]
    kept = jnp.zeros((flat.shape[0], width), bool).at[row, flat].set(True, mode="drop")
    return kept.reshape(*lead, width)


def _restored(
    config: MemoryConfig,
    params: Parameters,
    layer: Layer,
    kept: Bool[Array, "B K T"],
    positions: Int[Array, "B T"],
    behind: Bool[Array, "B T"],
    rope_frequencies: Float[Array, " D/2"],
) -> tuple[Float[Array, "B H T D"], Float[Array, "B H T"], Float[Array, "B H T"]]:
    """Attention to what is left with the memory, the memory's weight, and without the memory."""
    new = layer.new
    spread = jnp.broadcast_to(positions[:, None], kept.shape)
    stays = kept | behind[:, None]
    without, lse = attention(
        new.queries, new.keys, new.values, positions, jnp.where(stays, spread, -1), layer.window
    )
    without, lse = lax.stop_gradient((without, lse))
    evicted = (spread >= 0) & ~stays & (layer.window >= NO_WINDOW)
    remainder, (batch, heads, _, size) = LatentMemory(config=config), new.keys.shape
    empty = new_state(remainder.layer_fields(new.queries.shape[1], heads, size), (batch,))
    state = remainder.write(
        params, empty, new.keys, new.values, spread, evicted, rope_frequencies,
        aligned=True, decays=False,
    )  # fmt: skip
    m, mass, gate = remainder.recall(params, state, new.queries, new.queries_pre_rope)
    weight = latent.share(config, lse, mass, gate)
    return latent.combine(config, without, lse, m, mass, gate), weight, without
