"""One tiny decoder and ragged batch, and every policy at its scale, for tests of whole calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np

import kvjax
from kvjax.learned.indexer import IndexerConfig, init_indexer
from kvjax.learned.memory import MemoryConfig, init_memory
from kvjax.learned.retention import GateConfig, init_gates, per_layer
from kvjax.policies.latent_memory import PER_HEAD
from kvjax.policies.qfilters import calibrate
from tests import oracle

CONFIG = kvjax.ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_length=8192,
    windows=(None, 12, None),
)
LENGTHS = np.array([48, 31, 7], np.int32)
PROMPT = 48  # columns of the ragged batch
CAPACITY = 64  # room for the whole prompt and what follows it
QUARTER = np.array([12, 8, 2], np.int32)  # 25 % of each row

# Published windows are longer than these prompts.
OPTIONS: dict[str, dict[str, Any]] = {
    "ada-snapkv": {"window": 4},
    "cake": {"window": 4},
    "caote": {"window": 4},
    "chunkkv": {"window": 4, "chunk_size": 3},
    "duoattention": {"streaming_sinks": 2, "streaming_recent": 4, "length": 32},
    "indexmem": {"near": 2},
    "indexmem-no-memory": {"near": 2},
    "lagkv": {"lag": 8, "skip": 2, "recent": 4},
    "pyramidkv": {"window": 4},
    "restkv": {"window": 4},
    "rkv": {"window": 4, "decode_interval": 4},
    "snapkv": {"window": 4},
    "snapkv+memory": {"window": 4},
    "keydiff-block": {"chunk": 16, "decode_interval": 4},
}
NOT_HERE = {"kvzip": "replays the context through a tokenizer before it can compress"}


def names() -> list[str]:
    """Every registered policy that needs nothing but a model and a prompt."""
    return [name for name in kvjax.policy_names() if name not in NOT_HERE]


def policy(name: str, **options: Any) -> kvjax.Policy:
    """A registered policy with windows that fit the tiny prompts."""
    return kvjax.policy(name, **(OPTIONS.get(name, {}) | options))


@cache
def model(dtype: str = "float32", num_layers: int = 3) -> kvjax.Decoder:
    """Random weights, scaled so that attention is peaked as in a trained model."""
    config = CONFIG
    if num_layers != 3:
        config = dataclasses.replace(CONFIG, num_layers=num_layers, windows=())
    built = kvjax.Decoder.random(config, jax.random.key(7))
    built.layers.q_proj[...] = built.layers.q_proj[...] * 2.0
    return jax.tree.map(lambda array: array.astype(dtype), built)


@cache
def tokens(seed: int = 0, rows: int = 3, length: int = PROMPT) -> np.ndarray:
    """[rows, length] token ids."""
    return np.random.default_rng(seed).integers(1, 97, (rows, length)).astype(np.int32)


def params(name: str, dtype: str = "float32") -> Any:
    """What a policy has learned of the tiny model; None for most."""
    alone = {"indexmem": "indexmem-no-memory"}.get(name, name.removesuffix("+memory"))
    if alone != name:
        return {"scorer": params(alone, dtype), "memory": memory(PER_HEAD)}
    if name.startswith("retention"):
        return retention_gates()
    if name.startswith("indexmem"):
        return indexer()
    if name != "qfilters":
        return None
    queries = jax.random.normal(jax.random.key(1), (3, 4, 64, 8)) + 0.3
    return calibrate(queries.astype(dtype), 2)


def retention_gates(layers: int = 3) -> dict[str, jax.Array]:
    """Gates of every speed: entries that last for one step or for thousands."""
    gates = init_gates(
        GateConfig(width=16),
        jax.random.key(3),
        num_layers=layers,
        num_kv_heads=CONFIG.num_kv_heads,
        hidden_size=CONFIG.hidden_size,
        bias=3.0,
    )
    lively = {name: 40 * value if name.startswith("w") else value for name, value in gates.items()}
    return per_layer(GateConfig(width=16), lively, layers)


def memory(config: MemoryConfig = MemoryConfig(), layers: int = 3) -> dict[str, jax.Array]:
    """A memory with random weights and gates that are anywhere between closed and open."""
    arrays = init_memory(
        config,
        jax.random.key(5),
        num_layers=layers,
        num_heads=CONFIG.num_heads,
        num_kv_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
    )
    drawn = jax.random.normal(jax.random.key(6), arrays["gate_w2"].shape)
    return arrays | {"gate_w2": drawn, "gate_b2": jnp.zeros_like(arrays["gate_b2"])}


def indexer(layers: int = 3) -> dict[str, jax.Array]:
    """An indexer with random weights."""
    return init_indexer(
        IndexerConfig(),
        jax.random.key(4),
        num_layers=layers,
        num_heads=CONFIG.num_heads,
        head_dim=CONFIG.head_dim,
        hidden_size=CONFIG.hidden_size,
    )


@cache
def full(seed: int = 0, dtype: str = "float32") -> tuple[jax.Array, kvjax.PaddedCache]:
    """Logits and the full cache of the ragged batch."""
    return prefill(tokens(seed), LENGTHS, LENGTHS, kvjax.policy("full"), dtype=dtype)


def prefill(
    ids: np.ndarray,
    lengths: np.ndarray,
    budget: np.ndarray,
    policy: kvjax.Policy,
    *,
    dtype: str = "float32",
    capacity: int = CAPACITY,
    **options: Any,
) -> tuple[jax.Array, kvjax.PaddedCache]:
    """`kvjax.prefill` of the tiny model."""
    return kvjax.prefill(
        model(dtype),
        *(jnp.asarray(a) for a in (ids, lengths)),
        policy=policy,
        budget=jnp.asarray(budget),
        capacity=capacity,
        params=params(policy.name, dtype),
        **options,
    )


@jax.jit
def _dense(decoder: kvjax.Decoder, ids: jax.Array, visible: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, mask: oracle.dense(decoder, row, mask))(ids, visible)


def dense_logits(ids: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of the tiny model under dense masks [B, L, K, T, T]."""
    return np.asarray(_dense(model(), jnp.asarray(ids), jnp.asarray(visible)))


def kept(cache: kvjax.PaddedCache, layer: int, row: int, head: int) -> np.ndarray:
    """The positions that one head holds."""
    return np.asarray(cache.positions)[layer, row, head][
        : int(np.asarray(cache.lengths)[layer, row, head])
    ]


def check_invariants(cache: kvjax.PaddedCache, tokens_seen: np.ndarray) -> None:
    """Slots in front, positions ascending and in range, nothing of a row's future."""
    positions, lengths = np.asarray(cache.positions), np.asarray(cache.lengths)
    np.testing.assert_array_equal(cache.next_position, tokens_seen)
    assert (lengths >= 1).all(), "attention would be empty"
    assert (lengths <= cache.capacity).all()
    place = np.arange(cache.capacity)
    filled = place < lengths[..., None]
    assert (positions[~filled] == -1).all()
    assert (positions[filled] >= 0).all()
    assert (positions < np.asarray(tokens_seen)[None, :, None, None]).all()
    ascending = np.diff(positions, axis=-1) > 0
    assert (ascending | ~filled[..., 1:]).all()
    for array in (cache.keys, cache.values):
        assert np.isfinite(np.asarray(array, np.float32)).all()


def check_entries(cache: kvjax.PaddedCache, whole: kvjax.PaddedCache, tolerance: float = 0) -> None:
    """Keys and values are those of the full cache at the kept positions."""
    positions = np.asarray(cache.positions)
    index = np.maximum(positions, 0)[..., None]
    for found, all_of in ((cache.keys, whole.keys), (cache.values, whole.values)):
        wanted = np.take_along_axis(np.asarray(all_of, np.float32), index, axis=3)
        difference = np.where(positions[..., None] >= 0, np.asarray(found, np.float32) - wanted, 0)
        np.testing.assert_allclose(difference, 0, atol=tolerance)


@contextmanager
def quick_compilation() -> Iterator[None]:
    """Compiles without most optimizations: these tests run many programs, each a few times."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@contextmanager
def as_installed() -> Iterator[None]:
    """Without the tests' own checks of annotations, which users do not have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
