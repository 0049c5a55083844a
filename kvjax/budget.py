"""A budget: how much of a context may stay, as tokens, as a fraction, or as bytes."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.models.config import ModelConfig

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ALLOWED = (
    "allowed are tokens (an integer >= 1), a fraction in (0, 1] such as 0.25 or 25%, "
    "or bytes such as 64MiB"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Exactly one of: entries per head, a fraction of the prompt, or bytes of one row's cache."""

    tokens: int | None = None
    fraction: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.tokens, self.fraction, self.bytes) if x is not None]
        if len(given) != 1:
            raise ValueError(f"budget with {len(given)} values: give tokens, fraction or bytes")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"budget {self.tokens} tokens: {_ALLOWED}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"budget fraction {self.fraction}: {_ALLOWED}")
        if self.bytes is not None and self.bytes < 1:
            raise ValueError(f"budget {self.bytes} bytes: {_ALLOWED}")

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """From an int (tokens), a float (fraction), or text: '256', '0.25', '25%', '64MiB'.

        Raises:
          ValueError: anything else, in one line that names the value.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"budget {value!r}: {_ALLOWED}")
        if isinstance(value, int):
            return cls(tokens=value)
        if isinstance(value, float):
            return cls(fraction=value)
        text = value.strip()
        if re.fullmatch(r"[+-]?\d+", text):
            return cls(tokens=int(text))
        if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE):
            return cls(fraction=float(text))
        if percent := re.fullmatch(r"([+-]?\d+(?:\.\d+)?)\s*%", text):
            return cls(fraction=float(percent[1]) / 100)
        size = re.fullmatch(
            r"(?:bytes:)?\s*([+-]?\d+(?:\.\d+)?)\s*([KMG]?i?B)?", text, re.IGNORECASE
        )
        if size and (size[2] or text.lower().startswith("bytes:")):
            return cls(bytes=int(float(size[1]) * _UNITS[(size[2] or "").upper()]))
        raise ValueError(f"budget {value!r}: {_ALLOWED}")

    def resolve(self, length: int, config: ModelConfig, dtype: Any) -> int:
        """Entries per head for a prompt of `length` tokens: clip(round(.), 1, length).

        Raises:
          ValueError: bytes that hold less than one entry, or more than this machine has.
        """
        if length < 1:
            raise ValueError(f"a budget of a prompt of {length} tokens: allowed are lengths >= 1")
        if self.tokens is not None:
            entries = self.tokens
        elif self.fraction is not None:
            entries = round(self.fraction * length)
        else:
            assert self.bytes is not None
            each = entry_nbytes(config, dtype)
            if self.bytes < each:
                raise ValueError(
                    f"budget {self.bytes} bytes: one token of this model takes {each} bytes"
                )
            if self.bytes > (limit := available_bytes()):
                raise ValueError(f"budget {self.bytes} bytes: this machine has {limit} bytes")
            entries = self.bytes // each
        return max(1, min(entries, length))


def entry_nbytes(config: ModelConfig, dtype: Any) -> int:
    """Bytes that one token takes in a cache: K, V and a position in every layer and KV head."""
    per_head = 2 * config.head_dim * jnp.dtype(dtype).itemsize + 4
    return config.num_layers * config.num_kv_heads * per_head


def available_bytes() -> int:
    """Memory of the default device, or of the host where the device does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bucket_length(length: int) -> int:
    """The padded length that prompts of `length` share, so that they share a compilation.

    Steps of an eighth of the next power of two, at least 64: at most a fifth is padding beyond 256.
    """
    if length < 1:
        raise ValueError(f"length {length}: allowed are lengths >= 1")
    step = max(64, 2 ** max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step
