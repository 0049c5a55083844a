"""Architecture configs: one frozen dataclass covers every supported decoder family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

type Windows = tuple[int | None, ...]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: tuple[str, ...] = get_args(Family)
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_length",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and its long-context scaling.

    `factor` and `original_max_length` belong to every scaled kind; the frequency factors to
    llama3 (Llama 3.1); the betas, `attention_factor`, the mscales and `truncate` to yarn
    (arXiv:2309.00071). An `attention_factor` of None is derived from `factor` and the mscales.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r}: allowed are {', '.join(ROPE_KINDS)}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"rope theta {self.theta}: allowed are finite numbers above 1")
        if self.kind != "default" and not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"rope factor {self.factor}: allowed are finite numbers >= 1")
        if self.kind in ("llama3", "yarn") and self.original_max_length < 1:
            raise ValueError(
                f"rope original_max_length {self.original_max_length}: rope type {self.kind} needs "
                "the pretraining length, an integer >= 1"
            )
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor {self.low_freq_factor}: allowed are values below "
                f"high_freq_factor {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention, RoPE, RMSNorm and SwiGLU.

    `windows` holds one entry per layer: None for full attention, or W when a query attends to
    the W newest tokens including itself; an empty tuple means full attention in every layer.
    """

    family: Family = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_length: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: Windows = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model family {self.family!r}: allowed are {', '.join(FAMILIES)}")
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: allowed are integers >= 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: allowed are divisors of "
                f"num_heads={self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: RoPE needs an even head size")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries: allowed is one per layer, "
                f"{self.num_layers}"
            )
        for window in self.windows:
            if window is not None and window < 1:
                raise ValueError(f"window {window}: allowed are integers >= 1 or None")

    @property
    def group_size(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        """Width of the concatenated query heads (H * D)."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the concatenated KV heads (K * D)."""
        return self.num_kv_heads * self.head_dim

    @property
    def has_windows(self) -> bool:
        """Whether any layer attends to a sliding window only."""
        return any(window is not None for window in self.windows)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the dict of a Hugging Face `config.json`; see `kvjax.models.hf_config`."""
        from kvjax.models import hf_config

        return hf_config.read(raw)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` dict that a Hugging Face reader understands."""
        from kvjax.models import hf_config

        return hf_config.write(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `dataclasses.asdict`, after a trip through JSON."""
        values = dict(raw)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown config key {unknown[0]!r}: allowed are {sorted(known)}")
        values["rope"] = RopeConfig(**values["rope"])
        values["windows"] = tuple(values["windows"])
        return cls(**values)
