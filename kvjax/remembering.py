"""Where a remainder's memory meets the model and the cache: read in attention, written at a cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.attention import NO_WINDOW
from kvjax.cache import Cache
from kvjax.cache.padded import join
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Projected
from kvjax.policies.base import Policy

type Memory = dict[str, Array]
type Read = Callable[[Projected, Array, Array], Array]


def check_params(policy: Policy, params: Any, config: ModelConfig) -> None:
    """Refuses params in which the remainder's part is missing or another model's."""
    _, own = policy.split(params)
    if policy.remembers:
        policy.remainder.check_params(
            own,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )


def memory_of(
    cache: Cache, policy: Policy | None, params: Any, config: ModelConfig
) -> tuple[Any, Memory]:
    """The remainder's params and what `cache` carries for it, both [L, ...]; empty without one.

    Raises:
      ValueError: a cache that carries a memory without the policy that reads it, a policy with
        one for a cache that carries none or another, or wrong params.
    """
    held = cache.policy_state.memory
    found = {name: array.shape[2:] for name, array in held.items()}
    if policy is None or not policy.remembers:
        if held:
            raise ValueError(
                "this cache carries a memory of what was evicted: pass the policy that wrote it, "
                "and its params"
            )
        return None, {}
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
    wanted = {name: f.shape for name, f in policy.remainder.layer_fields(*sizes).items()}
    if found != wanted:
        raise ValueError(
            f"policy {policy.name!r} reads a memory of shapes {wanted}, this cache carries "
            f"{found or 'none'}: prefill with the policy that goes on"
        )
    check_params(policy, params, config)
    return policy.split(params)[1], held


def reader(policy: Policy | None, params: Any, memory: Memory) -> Read | None:
    """How a layer reads its memory, given one layer of what `memory_of` returns."""
    if policy is None or not memory:
        return None
    remainder = policy.remainder

    def read(new: Projected, attention: Array, lse: Array) -> Array:
        return remainder.read(params, memory, new.queries, new.queries_pre_rope, attention, lse)

    return read


def remember(
    policy: Policy,
    params: Any,
    memory: Memory,
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    positions: Int[Array, "B K S"],
    keep: Bool[Array, "B K S"],
    window: Int[Array, ""],
    rope_frequencies: Float[Array, " D/2"],
    *,
    aligned: bool = False,
    decays: bool = True,
) -> Memory:
    """One layer's memory after a cut that leaves `keep`; `params` are the remainder's.

    A sliding-window layer writes nothing: what it evicts, attention would not see either.
    """
    evicted = (positions >= 0) & ~keep & (window >= NO_WINDOW)
    return policy.remainder.write(
        params, memory, keys, values, positions, evicted, rope_frequencies,
        aligned=aligned, decays=decays,
    )  # fmt: skip


def remember_all(
    policy: Policy,
    params: Any,
    cache: Cache,
    keys: Float[Array, "L B K T D"],
    values: Float[Array, "L B K T D"],
    positions: Int[Array, "B T"],
    keep: Bool[Array, "L B K U"],
    windows: Int[Array, " L"],
    rope_frequencies: Float[Array, " D/2"],
) -> Memory:
    """All layers' memory after a cut of the union of slots and new tokens, layer by layer."""
    spread = jnp.broadcast_to(positions[:, None], keys.shape[1:4])

    def one_layer(_: None, inputs: Any) -> tuple[None, Memory]:
        view, new_keys, new_values, stays, window, layer_params, memory = inputs
        union = join(cache.dense(view), (new_keys, new_values, spread))
        return None, remember(policy, layer_params, memory, *union, stays, window, rope_frequencies)

    memory = cache.policy_state.memory
    return lax.scan(one_layer, None, (cache.views, keys, values, keep, windows, params, memory))[1]
