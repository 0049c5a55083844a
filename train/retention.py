"""Training of retention gates: the frozen model under decaying entries, within a capacity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.occupancy import occupancy_at
from kvjax import placement
from kvjax.learned import modules
from kvjax.learned.retention import (
    GateConfig,
    Gates,
    init_gates,
    initial_bias,
    log_beta,
    per_layer,
)
from kvjax.models.decoder import Decoder
from kvjax.whole import check_whole
from train.attention import retention_attention
from train.objectives import token_losses
from train.passes import plain_pass
from train.recipe import Batch
from train.start import started, with_stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    """Loss and gates of TRIM-KV (arXiv 2512.03324) and Make Each Token Count (arXiv 2605.09649).

    loss = mean of the chosen terms of {forward KL to the full cache, next-token cross-entropy}
           + weight x capacity
    """

    name: str = "retention-global"  # of the exported module, a policy name
    gate: Literal["rg", "rg10"] = "rg10"
    width: int = 512
    share_output: bool = True
    tie_heads: bool = False
    bias: float | None = None  # None: ln(length) + 7.6
    start: str | None = None  # directory of an exported module whose gates to go on from
    capacity: Literal["global", "local"] | None = None  # None: as the policy's name says
    memory: int = 128  # entries per head that the capacity loss asks for
    capacity_weight: float = 1.0
    kl: bool = True
    ce: bool = True
    positions: int = 128  # sampled for the capacity loss in every row; 0 takes all
    vocabulary_block: int = 128

    def __post_init__(self) -> None:
        if self.name not in ("retention-local", "retention-global"):
            raise ValueError(
                f"module.name={self.name!r}: allowed: retention-local, retention-global"
            )
        if self.capacity not in (None, "global", "local"):
            raise ValueError(f"module.capacity={self.capacity!r}: allowed: global, local")
        if not (math.isfinite(weight := self.capacity_weight) and weight >= 0):
            raise ValueError(f"module.capacity_weight={weight}: allowed: numbers >= 0")
        if self.bias is not None and not math.isfinite(self.bias):
            raise ValueError(f"module.bias={self.bias}: allowed: finite numbers")
        for name, least in (("memory", 1), ("positions", 0), ("vocabulary_block", 1)):
            check_whole(f"module.{name}", getattr(self, name), least)
        if not (self.kl or self.ce):
            raise ValueError("module.kl and module.ce are both false: one is needed")
        self.gates  # noqa: B018 (checks its own fields)

    @property
    def shared_by(self) -> Literal["global", "local"]:
        """Whose entries the capacity counts: all heads' together, or each head's for itself."""
        return self.capacity or ("local" if self.name == "retention-local" else "global")

    @property
    def gates(self) -> GateConfig:
        return GateConfig(
            kind=self.gate,
            width=self.width,
            share_output=self.share_output,
            tie_heads=self.tie_heads,
        )


class RetentionRecipe:
    """Gates on a frozen decoder; see `train.recipe.Recipe`."""

    def __init__(self, config: RetentionConfig, length: int):
        if config.memory >= length:
            raise ValueError(
                f"module.memory={config.memory}: rows have {length} tokens, which all fit; allowed "
                f"are integers < {length}"
            )
        self.config, self.length = config, length

    def init(self, model: Decoder, key: Array) -> Gates:
        bias = initial_bias(self.length) if self.config.bias is None else self.config.bias
        fresh = init_gates(
            self.config.gates,
            key,
            num_layers=model.config.num_layers,
            num_kv_heads=model.config.num_kv_heads,
            hidden_size=model.config.hidden_size,
            bias=bias,
        )
        options = dataclasses.asdict(self.config.gates)
        return started(self.config.start, "retention", options, fresh)

    def axes(self, params: Gates) -> dict[str, tuple[str | None, ...]]:
        """The hidden width is split as the model's MLP is; what is small stands everywhere."""
        names: dict[str, tuple[str | None, ...]] = {
            "w1": ("layers", "embed", "mlp"),
            "b1": ("layers", "mlp"),
            "w2": ("layers", "mlp", None),
        }
        return {name: names.get(name, (None,) * array.ndim) for name, array in params.items()}

    def fixed(self, model: Decoder) -> None:
        """Nothing."""

    def loss(
        self, params: Gates, model: Decoder, batch: Batch, key: Array, fixed: None = None
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        config, layers = self.config, model.config.num_layers
        tokens, segments = batch["tokens"], batch["segments"]
        at = sampled_positions(key, segments, config.positions)
        gates = per_layer(config.gates, params, layers)
        student, held = decayed_pass(model, gates, batch, at)
        teacher = plain_pass(model, batch) if config.kl else None
        losses = token_losses(
            model, student, teacher, tokens, batch["labels"], config.vocabulary_block
        )
        cross_entropy, divergence = losses.means
        terms = [term for on, term in ((config.kl, divergence), (config.ce, cross_entropy)) if on]
        base = sum(terms, jnp.zeros((), jnp.float32)) / len(terms)
        age = jnp.take_along_axis(batch["positions"], at, axis=1)  # 0 for a document's first
        present = jnp.take_along_axis(segments, at, axis=1) >= 0
        capacity = capacity_loss(held, age, present, config.memory, config.shared_by)
        share = jnp.mean(held, axis=(0, 2)) / (age + 1).astype(jnp.float32)
        count = jnp.maximum(jnp.sum(present), 1).astype(jnp.float32)
        kept = jnp.sum(jnp.where(present, share, 0.0)) / count
        return base + config.capacity_weight * capacity, {
            "kl": divergence,
            "ce": cross_entropy,
            "capacity": capacity,
            "occupancy": kept,  # share of the entries that are alive, softly
        }

    def export(
        self, params: Gates, model: Decoder, directory: Path, training: Mapping[str, Any]
    ) -> None:
        card = modules.Card(
            module=self.config.name,
            kind="retention",
            options=dataclasses.asdict(self.config.gates),
            backbone=str(training.get("model", "")),
            fingerprints=modules.fingerprints(model),
            training=with_stages(self.config.start, training),
        )
        modules.save_module(directory, params, card)


def decayed_pass(
    model: Decoder, gates: Gates, batch: Batch, at: Int[Array, "B P"]
) -> tuple[Float[Array, "B T E"], Float[Array, "L B K P"]]:
    """The last residual stream under decay, and the soft occupancy S at the positions `at`.

    Attention weights are proportional to beta_j^(i - j) exp(z_ij); S(t) = sum over i <= t of
    beta_i^(t - i). Every layer is computed again in the backward pass.
    """
    segments = batch["segments"]
    rotation = model.rotation(jnp.maximum(batch["positions"], 0))
    mesh = placement.mesh_of(model)

    @jax.checkpoint
    def body(x: Array, inputs: Any) -> tuple[Array, Array]:
        layer, window, own = inputs
        x = placement.spread(x, mesh)
        new = layer.project(x, *rotation)
        rate = log_beta(own, new.hidden, model.config.num_kv_heads)
        out = retention_attention(new, rate, segments, _window(model, window), mesh)
        return layer.finish(x, out), occupancy_at(rate, segments, at)

    inputs = (model.layers, jnp.asarray(model.windows), gates)
    return lax.scan(body, model.embed(batch["tokens"]), inputs)


def capacity_loss(
    held: Float[Array, "L B K P"],
    age: Int[Array, "B P"],
    present: Bool[Array, "B P"],
    memory: int,
    capacity: Literal["global", "local"],
) -> Float[Array, ""]:
    """max(0, (S - M n) / max(t n - M n, 1)), mean over its positive elements.

    "local": each head of each layer for itself, n = 1. "global": S is summed over all of them,
    n = layers x heads, so that they trade capacity freely. t is the 0-based position within the
    document. Undecayed gates give 1 where t is well above M, and at t = M, where the bound of 1
    acts, n.
    """
    if capacity == "global":
        heads = held.shape[0] * held.shape[2]
        held = jnp.sum(held, axis=(0, 2))
    else:
        heads, age, present = 1, age[None, :, None], present[None, :, None]
    reach = jnp.maximum((age - memory).astype(jnp.float32) * heads, 1.0)
    over = (held - float(memory * heads)) / jnp.broadcast_to(reach, held.shape)
    over = jnp.where(jnp.broadcast_to(present, held.shape), jnp.maximum(over, 0.0), 0.0)
    return jnp.sum(over) / jnp.maximum(jnp.sum(over > 0), 1).astype(jnp.float32)


def sampled_positions(key: Array, segments: Int[Array, "B T"], count: int) -> Int[Array, "B P"]:
    """`count` places of each row, drawn without replacement; all of them where it is 0."""
    batch, length = segments.shape
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if count == 0 or count >= length:
        return places
    keys = jax.random.split(key, batch)
    return jax.vmap(lambda k, row: jax.random.choice(k, row, (count,), replace=False))(keys, places)


def _window(model: Decoder, window: Array) -> Array | None:
    return window if any(model.config.windows) else None
