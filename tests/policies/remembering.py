"""Tiny policies with a memory of what they evicted, and the calls of one conversation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.learned.memory import MemoryConfig
from kvjax.policies.latent_memory import LatentMemory
from tests import tiny
from tests.tiny import CAPACITY, LENGTHS, QUARTER

QUESTION = np.random.default_rng(5).integers(1, 97, (3, 5)).astype(np.int32)
ASKED = np.array([5, 3, 1], np.int32)
CONFIGS = [
    MemoryConfig(),
    MemoryConfig(coordinates="post_rope", combine="lse", gate="per_head"),
    MemoryConfig(phi="dense", combine="convex", gate="linear"),
    MemoryConfig(phi="per_head", size=8, combine="lse", decay=0.5),
]


def remembering(name: str, config: MemoryConfig = MemoryConfig(), **options: Any) -> kvjax.Policy:
    """The policy that evicts once unless told otherwise, with a memory."""
    given = {"prefill": "whole", "decode_interval": 0} | options
    return tiny.policy(name, remainder=LatentMemory(config=config), **given)


def plain(policy: kvjax.Policy) -> kvjax.Policy:
    return dataclasses.replace(policy, remainder=kvjax.policies.Remainder())


def params(name: str, config: MemoryConfig = MemoryConfig(), layers: int = 3) -> dict[str, Any]:
    scorer = tiny.params(name)
    if scorer is not None:
        scorer = {key: array[:layers] for key, array in scorer.items()}
    return {"scorer": scorer, "memory": tiny.memory(config, layers)}


def closed(given: dict[str, Any]) -> dict[str, Any]:
    bias = jnp.full_like(given["memory"]["gate_b2"], -jnp.inf)
    return given | {"memory": given["memory"] | {"gate_b2": bias}}


def prefill(policy, given, budget=QUARTER, *, model=None, capacity=CAPACITY, **options):
    return kvjax.prefill(
        tiny.model() if model is None else model,
        *(jnp.asarray(a) for a in (tiny.tokens(), LENGTHS)),
        policy=policy,
        budget=jnp.asarray(budget),
        capacity=capacity,
        params=given,
        **options,
    )


def ask(policy, given, cache, *, model=None):
    return kvjax.extend(
        tiny.model() if model is None else model,
        cache,
        *(jnp.asarray(a) for a in (QUESTION, ASKED)),
        policy=policy,
        params=given,
        budget=jnp.asarray(QUARTER),
    )


def answer(policy, given, logits, cache, *, steps=6):
    return kvjax.generate(
        tiny.model(),
        cache,
        logits,
        max_new_tokens=steps,
        policy=policy,
        params=given,
        budget=jnp.asarray(QUARTER),
    )


def memory_of(cache):
    return {n.removeprefix("memory."): np.asarray(a) for n, a in cache.policy_state.memory.items()}


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
