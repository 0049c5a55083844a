"""IndexMem's indexer: a small attention of its own that says which keys queries will need."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.pooled_max import pooled_max
from kvjax.whole import check_whole

type Activation = Literal["relu", "identity"]
_EPSILON = 1e-6  # of the normalisation
# What is kept must not depend on how a device rounds its products.
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """The shape of an indexer, and how it scores (IndexMem, arXiv 2605.25475).

    `heads` and `size` None are the paper's H / 4 and D / 8, at least 1 and 8. The paper names no
    activation; "relu" is that of the DeepSeek indexer it follows. Pairs of a query and a key nearer
    than `near` tokens are left out of the maximum over queries: every token needs its neighbours,
    which says nothing about what it is worth later. The paper counts all pairs, near 0.
    """

    heads: int | None = None
    size: int | None = None
    activation: Activation = "relu"
    near: int = 8

    def __post_init__(self) -> None:
        for name, least in (("heads", 1), ("size", 1), ("near", 0)):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least)
        if self.activation not in ("relu", "identity"):
            raise ValueError(f"activation={self.activation!r}: allowed are 'relu' and 'identity'")

    def heads_of(self, num_heads: int) -> int:
        """Indexer heads beside `num_heads` query heads."""
        return max(1, num_heads // 4) if self.heads is None else self.heads

    def size_of(self, head_dim: int) -> int:
        """Numbers in an index key beside heads of size `head_dim`."""
        return max(8, head_dim // 8) if self.size is None else self.size


type Indexer = dict[str, Array]
"""With I indexer heads of size P: wq [L, H D, I P], wk [L, E, P], wg [L, E, I], q_norm [L, P],
k_norm [L, P]; without L inside a layer."""


def init_indexer(
    config: IndexerConfig,
    key: Array,
    *,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    hidden_size: int,
) -> Indexer:
    """Float32 parameters: matrices from N(0, 1 / rows), scales of the normalisations 1."""
    heads, size = config.heads_of(num_heads), config.size_of(head_dim)
    shapes = {
        "wq": (num_heads * head_dim, heads * size),
        "wk": (hidden_size, size),
        "wg": (hidden_size, heads),
    }
    indexer = {
        name: jax.random.normal(jax.random.fold_in(key, index), (num_layers, *shape))
        * jnp.float32(shape[0] ** -0.5)
        for index, (name, shape) in enumerate(shapes.items())
    }
    ones = jnp.ones((num_layers, size), jnp.float32)
    return indexer | {"q_norm": ones, "k_norm": ones}


def index_queries(
    indexer: Indexer, queries_pre_rope: Float[Array, "B H T D"]
) -> Float[Array, "B I T P"]:
    """U_q of a token's query heads side by side, normalised per indexer head, float32."""
    batch, _, tokens, _ = queries_pre_rope.shape
    flat = jnp.swapaxes(queries_pre_rope, 1, 2).reshape(batch, tokens, -1).astype(jnp.float32)
    size = indexer["wk"].shape[1]
    heads = _matmul(flat, indexer["wq"]).reshape(batch, tokens, -1, size)
    return jnp.swapaxes(_normalised(heads, indexer["q_norm"]), 1, 2)


def index_keys(indexer: Indexer, hidden: Float[Array, "B T E"]) -> Float[Array, "B T P"]:
    """U_k of the normalised input of the attention block, normalised: one key for all heads."""
    return _normalised(_matmul(hidden.astype(jnp.float32), indexer["wk"]), indexer["k_norm"])


def head_gates(indexer: Indexer, hidden: Float[Array, "B T E"]) -> Float[Array, "B I T"]:
    """The weight of each indexer head at a query, of either sign: G x / sqrt(I P)."""
    rows = indexer["wq"].shape[1]  # I P
    gates = _matmul(hidden.astype(jnp.float32), indexer["wg"]) * jnp.float32(rows**-0.5)
    return jnp.swapaxes(gates, 1, 2)


def importance(
    queries: Float[Array, "B I T P"],
    gates: Float[Array, "B I T"],
    keys: Float[Array, "B S P"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    *,
    activation: Activation,
    near: int,
    query_segments: Int[Array, "B T"] | None = None,
    key_segments: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S"]:
    """max_s sum_i gate[s, i] act(q[s, i] . k[t]) over the queries s that see t; -inf for none.

    Positions, segments and `near` are those of `kernels_pallas.pooled_max`.
    """
    found, _ = pooled_max(
        queries,
        keys[:, None],
        query_positions,
        key_positions,
        weights=gates,
        query_segments=query_segments,
        key_segments=key_segments,
        activation=activation,
        reduce="sum",
        near=near,
    )
    return found


def _normalised(x: Float[Array, "*n P"], scale: Float[Array, " P"]) -> Float[Array, "*n P"]:
    """x / sqrt(mean(x^2) + eps) * scale."""
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean + _EPSILON) * scale.reshape((1,) * (x.ndim - 1) + (-1,))
