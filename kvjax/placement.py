"""Where activations and caches lie over the mesh of a model: rows, heads, and a prompt's tokens.

Left alone the compiler may keep every weight where it lies and exchange activations, which are
more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jaxtyping import Array, Float

from kernels_pallas import partition
from kvjax.cache import Cache
from kvjax.models.decoder import Decoder
from kvjax.models.sharding import ShardingRules
from kvjax.policies.observation import State

RULES = ShardingRules()


def mesh_of(model: Decoder) -> AbstractMesh | None:
    """The mesh of several devices that the model's weights lie on, placed by the compiler."""
    return partition.mesh_of(model.embedding.get_value())


def spread(x: Float[Array, "B T E"], mesh: AbstractMesh | None) -> Float[Array, "B T E"]:
    """`x` with its rows over data and its tokens over the sequence."""
    return x if mesh is None else _placed(x, ("batch", "tokens", None), mesh)


def fetched_head(model: Decoder, mesh: AbstractMesh | None) -> Array:
    """The output weights in one piece along E, for loops that would fetch them in each round."""
    axes = (None, "vocab") if model.lm_head is not None else ("vocab", None)
    return model.head if mesh is None else _placed(model.head, axes, mesh)


def settled(cache: Cache, mesh: AbstractMesh | None) -> Cache:
    """The cache with its rows over data and its heads over tensor, whole on every other axis."""
    if mesh is None:
        return cache

    def place(name: str, array: Array) -> Array:
        axes = ("layers", "batch", "kv_heads") if cache.row_axes.get(name) else ("batch",)
        return _placed(array, axes[:2] if name == "layer" else axes, mesh)

    def place_all(name: str, arrays: dict[str, Array]) -> dict[str, Array]:
        return {key: place(name, array) for key, array in arrays.items()}

    state = cache.policy_state
    arrays: dict[str, Any] = {
        field.name: place(field.name, getattr(cache, field.name))
        for field in dataclasses.fields(cache)
        if field.name != "policy_state"
    }
    slots, layer = place_all("slots", state.slots), place_all("layer", state.layer)
    return dataclasses.replace(cache, **arrays, policy_state=State(slots=slots, layer=layer))


def _placed(array: Array, axes: tuple[str | None, ...], mesh: AbstractMesh) -> Array:
    spec = RULES.spec(axes, array.shape[: len(axes)], mesh)
    return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))
