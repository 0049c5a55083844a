"""The decoder: one architecture for every family, layers stacked for `jax.lax.scan`.

The decoder knows nothing of caches. A layer gives its queries, keys and values (`project`) and
takes back what attention made of them (`finish`); the caller decides what is attended to.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from kvjax.models import rope
from kvjax.models.config import ModelConfig
from kvjax.models.layout import layout
from kvjax.models.sharding import ShardingRules, parameter_shardings

NO_WINDOW = 2**30
SAMPLES_PER_AXIS = 16

type Adapters = Mapping[str, tuple[Array, Array]]
"""Low-rank additions to one layer's projections, by name: (down [F, R], up [R, O]) adds
(x down) up to the projection's output. Those not named are as they are."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Projected:
    """What one layer computes before attention."""

    hidden: Float[Array, "B T E"]  # normalised input of the layer
    queries_pre_rope: Float[Array, "B H T D"]  # after q_norm where the family has one
    queries: Float[Array, "B H T D"]
    keys: Float[Array, "B K T D"]  # after RoPE, at their true positions
    values: Float[Array, "B K T D"]


class DecoderLayer(nnx.Module):
    """All layers, stacked on a leading axis [L, ...], or one of them inside a scan.

    `jax.lax.scan(body, x, model.layers)` hands `body` a `DecoderLayer` without the layer axis;
    `project` and `finish` expect that form.
    """

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Any]) -> None:
        def optional(name: str) -> nnx.Param | None:
            return nnx.Param(parameters[name]) if name in parameters else None

        self.config = config
        self.attention_norm = nnx.Param(parameters["attention_norm"])
        self.q_proj = nnx.Param(parameters["q_proj"])
        self.k_proj = nnx.Param(parameters["k_proj"])
        self.v_proj = nnx.Param(parameters["v_proj"])
        self.o_proj = nnx.Param(parameters["o_proj"])
        self.q_bias = optional("q_bias")
        self.k_bias = optional("k_bias")
        self.v_bias = optional("v_bias")
        self.o_bias = optional("o_bias")
        self.q_norm = optional("q_norm")
        self.k_norm = optional("k_norm")
        self.mlp_norm = nnx.Param(parameters["mlp_norm"])
        self.gate_proj = nnx.Param(parameters["gate_proj"])
        self.up_proj = nnx.Param(parameters["up_proj"])
        self.down_proj = nnx.Param(parameters["down_proj"])
        self.gate_bias = optional("gate_bias")
        self.up_bias = optional("up_bias")
        self.down_bias = optional("down_bias")

    def project(
        self,
        x: Float[Array, "B T E"],
        cos: Float32[Array, "B T half"],
        sin: Float32[Array, "B T half"],
        adapters: Adapters | None = None,
    ) -> Projected:
        """Normalise the residual stream and compute queries, keys and values.

        `cos` and `sin` come from `Decoder.rotation` at the tokens' absolute positions. Query
        head h belongs to KV head h // (H // K). `adapters` are this layer's.
        """
        c, low = self.config, adapters or {}
        with jax.named_scope("project"):
            hidden = rms_norm(x, self.attention_norm[...], c.norm_eps)
            queries = _linear(hidden, self.q_proj, self.q_bias, low.get("q_proj"))
            keys = _linear(hidden, self.k_proj, self.k_bias, low.get("k_proj"))
            values = _linear(hidden, self.v_proj, self.v_bias, low.get("v_proj"))
            queries, keys, values = (_split_heads(a, c.head_dim) for a in (queries, keys, values))
            if self.q_norm is not None and self.k_norm is not None:
                queries = rms_norm(queries, self.q_norm[...], c.norm_eps)
                keys = rms_norm(keys, self.k_norm[...], c.norm_eps)
            return Projected(
                hidden=hidden,
                queries_pre_rope=queries,
                queries=rope.apply_rope(queries, cos, sin),
                keys=rope.apply_rope(keys, cos, sin),
                values=values,
            )

    def finish(
        self,
        x: Float[Array, "B T E"],
        attention: Float[Array, "B H T D"],
        adapters: Adapters | None = None,
    ) -> Float[Array, "B T E"]:
        """Output projection, residual, MLP, residual; `adapters` are this layer's."""
        batch, heads, tokens, dim = attention.shape
        low = adapters or {}
        with jax.named_scope("output"):
            merged = attention.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * dim)
            merged = merged.astype(x.dtype)
            x = x + _linear(merged, self.o_proj, self.o_bias, low.get("o_proj"))
        with jax.named_scope("mlp"):
            hidden = rms_norm(x, self.mlp_norm[...], self.config.norm_eps)
            gate = _linear(hidden, self.gate_proj, self.gate_bias, low.get("gate_proj"))
            up = _linear(hidden, self.up_proj, self.up_bias, low.get("up_proj"))
            gated = jax.nn.silu(gate) * up
            return x + _linear(gated, self.down_proj, self.down_bias, low.get("down_proj"))

    @property
    def output_projection(self) -> Float[Array, "*L H D E"]:
        """The output projection per query head."""
        weight = self.o_proj[...]
        heads = (self.config.num_heads, self.config.head_dim)
        return weight.reshape(*weight.shape[:-2], *heads, weight.shape[-1])


class Decoder(nnx.Module):
    """A decoder-only language model; `parameters` maps names of the layout table to arrays."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Any]) -> None:
        expected = {row.name for row in layout(config)}
        if expected != set(parameters):
            missing = sorted(expected - set(parameters))
            extra = sorted(set(parameters) - expected)
            raise ValueError(f"decoder parameters: missing {missing}, not known {extra}")
        prefix = "layers."
        self.config = config
        self.embedding = nnx.Param(parameters["embedding"])
        self.layers = DecoderLayer(
            config,
            {
                name.removeprefix(prefix): value
                for name, value in parameters.items()
                if name.startswith(prefix)
            },
        )
        self.norm = nnx.Param(parameters["norm"])
        self.lm_head = None if config.tie_embeddings else nnx.Param(parameters["lm_head"])

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Token embeddings; an id outside the vocabulary gives NaN."""
        with jax.named_scope("embed"):
            return jnp.take(self.embedding[...], tokens, axis=0)

    @property
    def head(self) -> Array:
        """The output weights: [V, E] where they are the embedding, else [E, V]."""
        weights: Array = (self.embedding if self.lm_head is None else self.lm_head)[...]
        return weights

    def logits(self, x: Float[Array, "*n E"], head: Array | None = None) -> Float32[Array, "*n V"]:
        """Final norm and head, accumulated and returned in float32.

        `head` is `self.head`, or the same weights lying elsewhere on a mesh.
        """
        with jax.named_scope("logits"):
            x = rms_norm(x, self.norm[...], self.config.norm_eps)
            contracted = 1 if self.lm_head is None else 0
            return jax.lax.dot_general(
                x,
                self.head if head is None else head,
                (((x.ndim - 1,), (contracted,)), ((), ())),
                preferred_element_type=jnp.float32,
            )

    def rotation(
        self, positions: Int[Array, "*n"]
    ) -> tuple[Float32[Array, "*n half"], Float32[Array, "*n half"]]:
        """Cosines and sines of the rotary embedding at absolute positions."""
        frequencies, factor = self.rope_frequencies
        return rope.rotation(positions, frequencies, factor)

    @property
    def rope_frequencies(self) -> tuple[Float32[np.ndarray, " half"], float]:
        """Frequencies [D/2] in radians per token, and the factor on cos and sin."""
        return rope.rope_frequencies(self.config)

    @property
    def windows(self) -> Int[np.ndarray, " L"]:
        """Tokens each layer attends to, itself included; `NO_WINDOW` for full attention."""
        windows = self.config.windows
        return np.array([NO_WINDOW if w is None else w for w in windows], np.int32)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of parameters and activations."""
        return self.embedding.get_value().dtype

    @property
    def parameters(self) -> dict[str, Any]:
        """The arrays (or abstract leaves) by their name in the layout table."""
        result = {}
        for row in layout(self.config):
            owner = self.layers if row.stacked else self
            result[row.name] = getattr(owner, row.name.removeprefix("layers.")).get_value()
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, summed over devices only once."""
        return sum(value.size * value.dtype.itemsize for value in self.parameters.values())

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        key: Array,
        dtype: DTypeLike = jnp.float32,
        *,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ) -> Decoder:
        """A decoder with random weights: N(0, 1/fan_in), norms one, biases zero."""
        rows = layout(config)

        def initialise(key: Array) -> dict[str, Array]:
            keys = jax.random.split(key, len(rows))
            values = {}
            for row, row_key in zip(rows, keys, strict=True):
                if row.init == "normal":
                    fan_in = config.hidden_size if row.name == "embedding" else row.shape[-2]
                    scale = jnp.asarray(1 / math.sqrt(fan_in), dtype)
                    values[row.name] = jax.random.normal(row_key, row.shape, dtype) * scale
                else:
                    fill = 1 if row.init == "ones" else 0
                    values[row.name] = jnp.full(row.shape, fill, dtype)
            return values

        shardings = None if mesh is None else parameter_shardings(config, mesh, rules)
        return cls(config, jax.jit(initialise, out_shardings=shardings)(key))

    @classmethod
    def abstract(
        cls,
        config: ModelConfig,
        dtype: DTypeLike = jnp.float32,
        *,
        mesh: Mesh | None = None,
        rules: ShardingRules | None = None,
    ) -> Decoder:
        """The decoder with `jax.ShapeDtypeStruct` leaves, for compiling without weights."""
        shardings = {} if mesh is None else parameter_shardings(config, mesh, rules)
        return cls(
            config,
            {
                row.name: jax.ShapeDtypeStruct(
                    row.shape, jnp.dtype(dtype), sharding=shardings.get(row.name)
                )
                for row in layout(config)
            },
        )

    @classmethod
    def shardings(
        cls, config: ModelConfig, mesh: Mesh, rules: ShardingRules | None = None
    ) -> Decoder:
        """The decoder with `NamedSharding` leaves, for `in_shardings` and `out_shardings`."""
        return cls(config, parameter_shardings(config, mesh, rules))

    def fingerprint(self, dtype: str | None = None) -> str:
        """16 hex digits that identify config and weights, whatever device holds them.

        With `dtype`, those of the weights rounded to it.

        Caches and learned modules record it and are refused for another backbone. Hashes a
        strided sample of every parameter, so it costs milliseconds; not for use under jit.
        """
        digest = hashlib.sha256()
        digest.update(json.dumps(dataclasses.asdict(self.config), sort_keys=True).encode())
        samples = jax.device_get(_sample(self.parameters, _everywhere(self.parameters)))
        for name, sample in sorted(samples.items()):
            digest.update(name.encode())
            rounded = sample if dtype is None else sample.astype(dtype)
            digest.update(rounded.astype("<f4").tobytes())
        return digest.hexdigest()[:16]


def _everywhere(parameters: Mapping[str, Array]) -> NamedSharding | None:
    """Where every process can read a result; None where the parameters lie on one device."""
    shardings = [value.sharding for value in parameters.values()]
    meshes = [where.mesh for where in shardings if isinstance(where, NamedSharding)]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else None


@functools.partial(jax.jit, static_argnames="where")
def _sample(parameters: dict[str, Array], where: NamedSharding | None) -> dict[str, Array]:
    def strided(value: Array) -> Array:
        strides = [max(1, size // SAMPLES_PER_AXIS) for size in value.shape]
        taken = value[tuple(slice(None, None, stride) for stride in strides)]
        return taken if where is None else jax.lax.with_sharding_constraint(taken, where)

    return {name: strided(value) for name, value in parameters.items()}


def rms_norm(
    x: Float[Array, "*n E"], weight: Float[Array, " E"], eps: float
) -> Float[Array, "*n E"]:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (arXiv:1910.07467)."""
    with jax.named_scope("rms_norm"):
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
        return normed * weight.reshape((1,) * (x.ndim - 1) + (-1,))


def _linear(
    x: Float[Array, "B T F"],
    weight: nnx.Param,
    bias: nnx.Param | None,
    adapter: tuple[Float[Array, "F R"], Float[Array, "R O"]] | None = None,
) -> Float[Array, "B T O"]:
    product = x @ weight[...]
    product = product if bias is None else product + bias[...].reshape(1, 1, -1)
    if adapter is None:
        return product
    down, up = adapter
    with jax.named_scope("adapter"):
        return product + (x.astype(down.dtype) @ down @ up).astype(product.dtype)


def _split_heads(x: Float[Array, "B T HD"], head_dim: int) -> Float[Array, "B N T D"]:
    batch, tokens, _ = x.shape
    return x.reshape(batch, tokens, -1, head_dim).transpose(0, 2, 1, 3)
