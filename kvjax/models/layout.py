"""The one table of decoder parameters, from which everything about weights follows.

Random initialisation, abstract shapes, shardings, and conversion from and to checkpoints all
read this table; adding a parameter means adding a row here and using it in the decoder.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvjax.models.config import ModelConfig

type Logical = str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One row of the table.

    `shape` is the stored shape, with a leading layer axis when `stacked`. `units` counts along
    each axis the pieces that sharding must not cut (a head, say). `key` and `gguf` are the
    checkpoint names with `{layer}` for the layer index; where `transpose` is set the checkpoint
    stores a layer's matrix as [out, in]. `heads` is the number of heads whose rows llama.cpp
    permutes for interleaved RoPE, or 0.
    """

    name: str
    shape: tuple[int, ...]
    units: tuple[int, ...]
    axes: tuple[Logical, ...]
    key: str
    gguf: str
    stacked: bool
    transpose: bool = False
    init: Literal["normal", "ones", "zeros"] = "normal"
    heads: int = 0

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The stored shape without the layer axis."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape of one tensor in a Hugging Face checkpoint."""
        return self.layer_shape[::-1] if self.transpose else self.layer_shape

    @property
    def copies(self) -> int:
        """How many checkpoint tensors fill this parameter."""
        return self.shape[0] if self.stacked else 1

    def source(self, layer: int) -> str:
        """The Hugging Face tensor name of `layer`."""
        return self.key.format(layer=layer)


def layout(config: ModelConfig) -> tuple[Parameter, ...]:
    """The parameters of a decoder with this config, in a fixed order."""
    c = config
    width = {
        "embed": (c.hidden_size, c.hidden_size),
        "mlp": (c.intermediate_size, c.intermediate_size),
        "vocab": (c.vocab_size, c.vocab_size),
        "query_heads": (c.query_size, c.num_heads),
        "kv_heads": (c.kv_size, c.num_kv_heads),
        "head_dim": (c.head_dim, c.head_dim),
    }
    rows = [
        _row(width, "embedding", "vocab embed", "model.embed_tokens.weight", "token_embd.weight"),
        *_layer_rows(c, width),
        _row(width, "norm", "embed", "model.norm.weight", "output_norm.weight", init="ones"),
    ]
    if not c.tie_embeddings:
        head = _row(width, "lm_head", "embed vocab", "lm_head.weight", "output.weight")
        rows.append(dataclasses.replace(head, transpose=True))
    return tuple(rows)


def _layer_rows(c: ModelConfig, width: dict[str, tuple[int, int]]) -> list[Parameter]:
    def vector(name: str, axis: str, key: str, gguf: str, heads: int = 0) -> Parameter:
        init: Literal["ones", "zeros"] = "zeros" if key.endswith(".bias") else "ones"
        source, gguf = f"model.layers.{{layer}}.{key}", f"blk.{{layer}}.{gguf}"
        row = _row(width, f"layers.{name}", axis, source, gguf, init=init, layers=c.num_layers)
        return dataclasses.replace(row, heads=heads)

    def matrix(name: str, axes: str, key: str, gguf: str, heads: int = 0) -> Parameter:
        source, gguf = f"model.layers.{{layer}}.{key}.weight", f"blk.{{layer}}.{gguf}.weight"
        row = _row(width, f"layers.{name}", axes, source, gguf, layers=c.num_layers)
        return dataclasses.replace(row, transpose=True, heads=heads)

    h, k = c.num_heads, c.num_kv_heads
    rows = [
        vector("attention_norm", "embed", "input_layernorm.weight", "attn_norm.weight"),
        matrix("q_proj", "embed query_heads", "self_attn.q_proj", "attn_q", h),
        matrix("k_proj", "embed kv_heads", "self_attn.k_proj", "attn_k", k),
        matrix("v_proj", "embed kv_heads", "self_attn.v_proj", "attn_v"),
        matrix("o_proj", "query_heads embed", "self_attn.o_proj", "attn_output"),
        vector("mlp_norm", "embed", "post_attention_layernorm.weight", "ffn_norm.weight"),
        matrix("gate_proj", "embed mlp", "mlp.gate_proj", "ffn_gate"),
        matrix("up_proj", "embed mlp", "mlp.up_proj", "ffn_up"),
        matrix("down_proj", "mlp embed", "mlp.down_proj", "ffn_down"),
    ]
    if c.qkv_bias:
        rows += [
            vector("q_bias", "query_heads", "self_attn.q_proj.bias", "attn_q.bias", h),
            vector("k_bias", "kv_heads", "self_attn.k_proj.bias", "attn_k.bias", k),
            vector("v_bias", "kv_heads", "self_attn.v_proj.bias", "attn_v.bias"),
        ]
    if c.output_bias:
        rows.append(vector("o_bias", "embed", "self_attn.o_proj.bias", "attn_output.bias"))
    if c.qk_norm:
        rows += [
            vector("q_norm", "head_dim", "self_attn.q_norm.weight", "attn_q_norm.weight"),
            vector("k_norm", "head_dim", "self_attn.k_norm.weight", "attn_k_norm.weight"),
        ]
    if c.mlp_bias:
        rows += [
            vector("gate_bias", "mlp", "mlp.gate_proj.bias", "ffn_gate.bias"),
            vector("up_bias", "mlp", "mlp.up_proj.bias", "ffn_up.bias"),
            vector("down_bias", "embed", "mlp.down_proj.bias", "ffn_down.bias"),
        ]
    return rows


def _row(
    width: dict[str, tuple[int, int]],
    name: str,
    axes: str,
    key: str,
    gguf: str,
    *,
    init: Literal["normal", "ones", "zeros"] = "normal",
    layers: int = 0,
) -> Parameter:
    names = axes.split()
    stack = (layers,) if layers else ()
    return Parameter(
        name=name,
        shape=stack + tuple(width[axis][0] for axis in names),
        units=stack + tuple(width[axis][1] for axis in names),
        axes=("layers",) * len(stack) + tuple(names),
        key=key,
        gguf=gguf,
        stacked=bool(layers),
        init=init,
    )
