"""Sizes of training passes in use: what is compiled without a device, and timed on one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of packed documents, `length` tokens each."""

    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    length: int
    dtype: str = "bfloat16"

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each argument of `retention_attention`, the window traced."""
        held = (self.batch, self.kv_heads, self.length)
        dtype = jnp.dtype(self.dtype)
        return {
            "queries": jax.ShapeDtypeStruct(
                (self.batch, self.heads, self.length, self.size), dtype
            ),
            "keys": jax.ShapeDtypeStruct((*held, self.size), dtype),
            "values": jax.ShapeDtypeStruct((*held, self.size), dtype),
            "log_beta": jax.ShapeDtypeStruct(held, jnp.float32),
            "segments": jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32),
            "window": jax.ShapeDtypeStruct((), jnp.int32),
        }


SHAPES = {
    "llama-8b-4k": Shape(length=4096),
    "llama-8b-32k": Shape(length=32768),
    "llama-8b-128k": Shape(length=131072),
    "llama-8b-4k-batch16": Shape(batch=16, length=4096),
    "llama-8b-4k-float32": Shape(length=4096, dtype="float32"),
    "smollm2-135m-2k": Shape(batch=8, heads=9, kv_heads=3, size=64, length=2048),
}
