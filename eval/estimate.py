"""How long a run will take: from the samples it has done, or from the machine's speed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from eval.config import Config
from eval.planning import Plan
from eval.records import SampleResult
from kvjax.models.config import ModelConfig

# Scoring and compaction beside a prefill, per policy and budget: measured between .01 and .2.
_COMPRESSION = 0.05
_TOKENS = 128  # of an answer, where neither config nor sample says


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What the device does in a second."""

    flops: float
    bytes: float

    @classmethod
    def measure(cls, config: ModelConfig, dtype: Any) -> Speed:
        """Half a second of products of the model's width and of copies."""
        size = (512, config.hidden_size)
        left, right = jnp.ones(size, dtype), jnp.ones((size[1], config.intermediate_size), dtype)
        product = _rate(jax.jit(jnp.matmul), left, right)
        block = jnp.ones(2**24, jnp.float32)
        copy = _rate(jax.jit(lambda x: x + 1), block)
        flops = 2 * 512 * right.size
        return cls(flops=flops * product, bytes=2 * block.nbytes * copy)


def measured(samples: Sequence[SampleResult], left: int) -> float | None:
    """Seconds for `left` more samples like those done; None where there are none."""
    if not samples:
        return None
    return left * sum(s.wall_seconds / s.batch for s in samples) / len(samples)


def predicted(
    config: Config, plan: Plan, model: ModelConfig, policies: int, speed: Speed, itemsize: int
) -> float:
    """Seconds of the model's own work if every answer runs to its full length.

    Prefill and questions are bound by products, decode steps by the larger of products and of
    reading weights and caches. Compilation, minutes with many policies, is not in it.
    """
    weights = _parameters(model)
    entry = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    seconds = 0.0
    for context in plan.contexts():
        length = min(context[0].length or model.max_length, model.max_length)
        prefill = (
            2 * weights * length
            + 2 * model.num_layers * model.num_heads * model.head_dim * length**2
        ) / speed.flops
        seconds += prefill * (1 + _COMPRESSION * policies * len(config.budgets))
        new = len(context) * (config.max_new_tokens or _TOKENS)
        rows = [(1, length)] + [(policies, _entries(b, length, model)) for b in config.budgets]
        for count, alive in rows:
            products = 2 * weights * count / speed.flops
            reads = (weights * itemsize + count * alive * entry) / speed.bytes
            seconds += new * max(products, reads)
    return seconds


def _entries(budget: int | float | str, length: int, model: ModelConfig) -> int:
    return kvjax.Budget.parse(budget).resolve(length, model, jnp.float32)


def _parameters(config: ModelConfig) -> int:
    shapes: Mapping[str, Any] = jax.eval_shape(
        lambda key: kvjax.Decoder.random(config, key), jax.random.key(0)
    )
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _rate(function: Any, *arguments: Any) -> float:
    """Calls per second."""
    jax.block_until_ready(function(*arguments))
    start, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < 0.25:
        jax.block_until_ready(function(*arguments))
        calls += 1
    return calls / spent
