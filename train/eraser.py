"""Training of the eraser: steering states with which the model replies as if never told.

The adapters see the prefix and the span alone. Gradients reach them through the states that they
leave in the span's slots, by way of the unchanged model that reads the whole edited cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

import kvjax
from kvjax import decoding, erasing
from kvjax.erasing.recomputation import Recompute
from kvjax.erasing.steering import KVEraser
from kvjax.learned.eraser import (
    KIND,
    MODULE,
    PROJECTIONS,
    STORED,
    Eraser,
    EraserConfig,
    Stored,
    init_eraser,
    read_adapters,
    save_eraser,
)
from kvjax.likelihood import residual_stream
from kvjax.models.decoder import Decoder
from train.data.erasing import PREFIX, REPLY, SPAN
from train.documents import one_document, to_front
from train.objectives import token_losses
from train.recipe import Batch, Params
from train.start import started, with_stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class EraserTraining:
    """KVEraser (arXiv 2606.17034): adapters, and what their states are to achieve.

    loss = ce x cross-entropy of the right answer + kl x KL(recomputed || edited), both over the
    answer's tokens

    Recomputed is the reply after the context without the span. The paper's loss could not be
    read: ce = 1, kl = 0 is the likeliest, and kl = 1 what the goal suggests.
    """

    name: str = MODULE
    rank: int = 16
    alpha: float = 32.0
    ce: float = 0.2
    kl: float = 1.0
    reply: int = 128  # tokens of question and answer that are read; labels behind do not count
    vocabulary_block: int = 128
    start: str | None = None  # directory of an exported eraser to go on from
    stored: Stored = "float32"  # the exported file's dtype

    def __post_init__(self) -> None:
        if self.name != MODULE:
            raise ValueError(f"module.name={self.name!r}: allowed: {MODULE}")
        for name in ("ce", "kl"):
            if not (math.isfinite(weight := getattr(self, name)) and weight >= 0):
                raise ValueError(f"module.{name}={weight}: allowed: numbers >= 0")
        if self.ce == self.kl == 0:
            raise ValueError("module.ce and module.kl are both 0: one has to count")
        if self.stored not in STORED:
            raise ValueError(f"module.stored={self.stored!r}: allowed: {', '.join(STORED)}")
        for name in ("reply", "vocabulary_block"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"module.{name}={value}: allowed: integers >= 1")
        self.eraser  # noqa: B018 (checks its own fields)

    @property
    def eraser(self) -> EraserConfig:
        return EraserConfig(rank=self.rank, alpha=self.alpha)


class EraserRecipe:
    """LoRA adapters beside a frozen decoder; see `train.recipe.Recipe`."""

    def __init__(self, config: EraserTraining, length: int, span: int):
        self.config, self.length = config, length
        self.extent = erasing.Extent(span=span, prefix=length, suffix=length)

    def init(self, model: Decoder, key: Array) -> Params:
        fresh = init_eraser(self.config.eraser, key, model.config).arrays
        options = dataclasses.asdict(self.config.eraser)
        return started(self.config.start, KIND, options, fresh, read_adapters)

    def axes(self, params: Params) -> dict[str, tuple[str | None, ...]]:
        """Split as the projections they belong to; the rank stays whole."""
        wide = {
            "q_proj": "query_heads",
            "k_proj": "kv_heads",
            "v_proj": "kv_heads",
            "o_proj": "embed",
        }
        wide |= {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "embed"}
        narrow = dict.fromkeys(PROJECTIONS, "embed") | {
            "o_proj": "query_heads",
            "down_proj": "mlp",
        }
        names: dict[str, tuple[str | None, ...]] = {}
        for name in PROJECTIONS:
            names[f"{name}.a"] = ("layers", narrow[name], None)
            names[f"{name}.b"] = ("layers", None, wide[name])
        return {name: names[name] for name in params}

    def fixed(self, model: Decoder) -> None:
        """Nothing."""

    def loss(
        self, params: Params, model: Decoder, batch: Batch, key: Array, fixed: None = None
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        rows, lengths = one_document(batch, key)
        tokens, parts = rows["tokens"], rows["parts"]
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        there = index < lengths[:, None]

        def count(marked: Array) -> Array:
            return jnp.sum(marked & there, axis=1, dtype=jnp.int32)

        start, context = count(parts == PREFIX), count(parts < REPLY)
        spans = jnp.stack([start, start + count(parts == SPAN)], axis=1)[:, None]
        reply = to_front(tokens, context)[:, : self.config.reply]
        labels = to_front(rows["labels"], context)[:, : self.config.reply]
        left = jnp.minimum(lengths - context, reply.shape[1])
        labels &= jnp.arange(reply.shape[1], dtype=jnp.int32)[None] < left[:, None] - 1

        width = tokens.shape[1]
        everything = jnp.full(context.shape, width, jnp.int32)
        full = kvjax.policy("full")
        _, cache = decoding.prefill(model, tokens, context, everything, policy=full, capacity=width)
        cache = lax.stop_gradient(cache)
        eraser = Eraser(config=self.config.eraser, arrays=params)
        given = (cache, tokens, spans)
        edited = erasing.apply(model, eraser, *given, KVEraser(), self.extent)
        clean = erasing.apply(model, None, *given, Recompute(), self.extent)
        student = residual_stream(model, edited, reply, left)
        teacher = lax.stop_gradient(residual_stream(model, clean, reply, left))
        losses = token_losses(model, student, teacher, reply, labels, self.config.vocabulary_block)
        ce, kl = losses.means
        return self.config.ce * ce + self.config.kl * kl, {"ce": ce, "kl": kl}

    def export(
        self, params: Params, model: Decoder, directory: Path, training: Mapping[str, Any]
    ) -> None:
        save_eraser(
            directory,
            Eraser(config=self.config.eraser, arrays=dict(params)),
            model,
            backbone=str(training.get("model", "")),
            training=with_stages(self.config.start, training),
            stored=self.config.stored,
        )
