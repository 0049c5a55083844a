"""What a call of an operation is made of, and sizes of Llama-3.1-8B's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one size."""

    make: Callable[[jax.Array], tuple[Any, ...]]  # arguments from a key
    call: Callable[..., Any]  # (*arguments, implementation=)
    bytes: float
    flops: float
    replaces: bool = False  # the result is the next call's first argument, in place
    agree: Callable[..., None] | None = None  # (arguments, found, wanted); None: close numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """One layer's attention: `queries` ask `tokens` slots, of which `kept` are kept."""

    tokens: int
    batch: int = 1
    queries: int = 0  # 0: every token asks
    kept: int = 1024
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    dtype: str = "bfloat16"

    @property
    def asking(self) -> int:
        return self.queries or self.tokens

    @property
    def pairs(self) -> int:
        """Pairs (query head, query, key) that see each other: the queries are the last tokens."""
        apart = self.asking * self.tokens - self.asking * (self.asking - 1) // 2
        return self.batch * self.heads * apart

    def normal(self, key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.dtype(self.dtype))

    def asked(self, key: jax.Array) -> jax.Array:
        return self.normal(key, self.batch, self.heads, self.asking, self.head_dim)

    def held(self, key: jax.Array) -> jax.Array:
        return self.normal(key, self.batch, self.kv_heads, self.tokens, self.head_dim)

    def asked_at(self) -> jax.Array:
        places = jnp.arange(self.tokens - self.asking, self.tokens, dtype=jnp.int32)
        return jnp.tile(places, (self.batch, 1))

    def held_at(self) -> jax.Array:
        places = jnp.arange(self.tokens, dtype=jnp.int32)
        return jnp.tile(places, (self.batch, self.kv_heads, 1))


def close(found: Any, wanted: Any) -> None:
    """Of the same shape, infinite at the same places, and nearly equal elsewhere."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        exact = not jnp.issubdtype(b.dtype, jnp.floating)
        rough = 2e-2 if b.dtype == jnp.bfloat16 else 5e-3  # tf32 is off by 5e-4 per product
        tolerance = 0.0 if exact else rough
        a, b = (np.asarray(x, x.dtype if exact else np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def close_in_units_of_largest(found: Any, wanted: Any) -> None:
    """For gradients, whose small entries are differences of large ones."""

    def scaled(array: jax.Array, by: jax.Array) -> jax.Array:
        top = jnp.max(jnp.abs(by.astype(jnp.float32)))
        return (array.astype(jnp.float32) / top).astype(jnp.bfloat16)

    close(*(jax.tree.map(scaled, tree, wanted) for tree in (found, wanted)))
