"""Sizes of the pooled maximum in use: what is compiled without a device, and timed on one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas.pooled_max.pairs import Activation, Reduce


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One call: a prompt of `length` tokens, or its last `queries`, looks at the whole prompt."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    length: int
    queries: int | None = None  # None: all tokens ask
    dtype: str = "bfloat16"
    activation: Activation = "identity"
    reduce: Reduce = "max"
    weighted: bool = False
    offset: bool = False

    @property
    def asking(self) -> int:
        return self.length if self.queries is None else self.queries

    @property
    def scale(self) -> float:
        return 1.0 if self.activation == "relu" else self.size**-0.5

    def specs(self) -> dict[str, jax.ShapeDtypeStruct | None]:
        """Shape and dtype of each argument of `pooled_max`; None for those left out."""
        asking = (self.batch, self.heads, self.asking)

        def numbers(there: bool) -> jax.ShapeDtypeStruct | None:
            return jax.ShapeDtypeStruct(asking, jnp.float32) if there else None

        dtype = jnp.dtype(self.dtype)
        return {
            "queries": jax.ShapeDtypeStruct((*asking, self.size), dtype),
            "keys": jax.ShapeDtypeStruct(
                (self.batch, self.kv_heads, self.length, self.size), dtype
            ),
            "query_positions": jax.ShapeDtypeStruct((self.batch, self.asking), jnp.int32),
            "key_positions": jax.ShapeDtypeStruct((self.batch, self.length), jnp.int32),
            "weights": numbers(self.weighted),
            "offsets": numbers(self.offset),
        }


def teacher(batch: int, length: int, dtype: str = "bfloat16") -> Shape:
    """Llama-3.1-8B's own heads, its log-probabilities pooled over heads and queries."""
    return Shape(
        batch=batch, heads=32, kv_heads=8, size=128, length=length, dtype=dtype, offset=True
    )


def indexer(batch: int, length: int, queries: int | None = None) -> Shape:
    """The indexer beside Llama-3.1-8B: H / 4 heads of size D / 8 and one key, float32."""
    return Shape(
        batch=batch,
        heads=8,
        kv_heads=1,
        size=16,
        length=length,
        queries=queries,
        dtype="float32",
        activation="relu",
        reduce="sum",
        weighted=True,
    )


SHAPES = {
    "teacher-4k": teacher(1, 4096),
    "teacher-32k": teacher(1, 32768),
    "teacher-128k": teacher(1, 131072),
    "teacher-4k-batch16": teacher(16, 4096),
    "teacher-4k-float32": teacher(1, 4096, "float32"),
    "indexer-4k": indexer(1, 4096),
    "indexer-32k": indexer(1, 32768),
    "indexer-128k": indexer(1, 131072),
    "indexer-4k-batch16": indexer(16, 4096),
    "indexer-decode-1k": indexer(16, 1024 + 128, 128),
}
