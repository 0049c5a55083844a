"""Prefill and one decode step from shapes alone: rows lie over data, KV heads over tensor."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax import decoding
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy


def trace_prefill(
    model: Decoder, mesh: Mesh, policy: Policy, *, rows: int, prompt: int, capacity: int
) -> jax.stages.Traced:
    """Prompts cut to a budget. `model` is `train.abstract.model_shapes` for the mesh."""
    return jax.jit(_prefill(policy, capacity)).trace(model, *_prompts(mesh, rows, prompt))


def trace_decode(
    model: Decoder, mesh: Mesh, policy: Policy, *, rows: int, prompt: int, capacity: int
) -> jax.stages.Traced:
    """One token for each row beside the cache of `trace_prefill`, which is updated in place.

    What the policy evicts while decoding is part of the step.
    """
    prompts = _prompts(mesh, rows, prompt)
    _, cache = jax.eval_shape(_prefill(policy, capacity), model, *prompts)

    def spread(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        known = {0: (), 1: ("data",)}
        return _placed(
            mesh, spec.shape, spec.dtype, *known.get(spec.ndim, (None, "data", "tensor"))
        )

    cache = jax.tree.map(spread, cache)

    def decode(model: Any, cache: Any, token: Any, lengths: Any, budget: Any) -> Any:
        return decoding.extend(model, cache, token, lengths, budget=budget, policy=policy)

    where = jax.tree.map(lambda spec: spec.sharding, cache)
    logits = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(decode, donate_argnums=1, out_shardings=(logits, where))
    return step.trace(model, cache, *_prompts(mesh, rows, 1))


def _prefill(policy: Policy, capacity: int) -> Any:
    chunked = policy.schedule.prefill == "chunked"
    run = decoding.prefill_chunked if chunked else decoding.prefill

    def prefill(model: Any, tokens: Any, lengths: Any, budget: Any) -> Any:
        return run(model, tokens, lengths, budget, policy=policy, capacity=capacity)

    return prefill


def _prompts(mesh: Mesh, rows: int, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Tokens, lengths and budget of every row."""
    each = _placed(mesh, (rows,), jnp.int32, "data")
    return _placed(mesh, (rows, tokens), jnp.int32, "data"), each, each


def _placed(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
    where = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
