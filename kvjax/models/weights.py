"""Fill the stacked parameters of a decoder from a source that holds one tensor per layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.layout import Parameter, layout
from kvjax.models.sharding import ShardingRules, parameter_sharding

type Index = tuple[slice, ...]


@runtime_checkable
class Source(Protocol):
    """A checkpoint that can read part of one tensor at a time."""

    def read(self, parameter: Parameter, layer: int, index: Index) -> np.ndarray:
        """The slice `index` of one layer's tensor, in the checkpoint's axis order."""
        ...

    def name(self, parameter: Parameter, layer: int) -> str:
        """What the checkpoint calls this tensor, for error messages."""
        ...


def fill(
    config: ModelConfig,
    source: Source,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> Decoder:
    """A decoder with the weights of `source`, each read straight to where it belongs.

    The stacked destination is allocated once and filled layer by layer in place, so the host
    holds one tensor at a time (one slice of it when sharded: a device's slice is read only
    once it is asked for). Raises `ValueError` naming a tensor with NaN or infinite weights.
    """
    return Decoder(
        config,
        {row.name: _fill_one(row, source, dtype, mesh, rules) for row in layout(config)},
    )


def default_dtype() -> np.dtype:
    """float32 on CPU, where bfloat16 is slow, and bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def _fill_one(
    row: Parameter,
    source: Source,
    dtype: DTypeLike,
    mesh: Mesh | None,
    rules: ShardingRules | None,
) -> Array:
    target = _target(row, mesh, rules)
    piece = _piece_sharding(row, target)
    dtype = jnp.dtype(dtype)
    destination = None
    if row.stacked:
        destination = jax.jit(lambda: jnp.zeros(row.shape, dtype), out_shardings=target)()
    finite = []
    for layer in range(row.copies):
        value = jax.make_array_from_callback(row.source_shape, piece, _reader(row, source, layer))
        place = _placer(row.transpose, dtype, target)
        destination, ok = place(destination, value, np.int32(layer))
        finite.append(ok)
    for layer, ok in enumerate(jax.device_get(finite)):
        if not ok:
            raise ValueError(
                f"tensor {source.name(row, layer)!r} holds NaN or infinite values in {dtype.name}: "
                "the checkpoint is damaged or overflows this dtype"
            )
    assert destination is not None
    return destination


def _reader(row: Parameter, source: Source, layer: int) -> Callable[[Index | None], np.ndarray]:
    # Replicas ask for the same slice; it is read once.
    read: dict[str, np.ndarray] = {}

    def callback(index: Index | None) -> np.ndarray:
        whole = tuple(slice(0, size) for size in row.source_shape)
        index = whole if index is None else index
        key = str(index)
        if key not in read:
            read[key] = source.read(row, layer, index)
        return read[key]

    return callback


def _target(row: Parameter, mesh: Mesh | None, rules: ShardingRules | None) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return parameter_sharding(row, mesh, rules)


def _piece_sharding(row: Parameter, target: Sharding) -> Sharding:
    if not isinstance(target, NamedSharding):
        return target
    parts = tuple(target.spec)[1 if row.stacked else 0 :]
    return NamedSharding(target.mesh, PartitionSpec(*(parts[::-1] if row.transpose else parts)))


@functools.cache
def _placer(
    transpose: bool, dtype: np.dtype, target: Sharding
) -> Callable[[Array | None, Array, np.int32], tuple[Array, Array]]:
    """Put one layer into the donated destination, and say whether all of it is finite."""

    def place(destination: Array | None, value: Array, layer: Array) -> tuple[Array, Array]:
        value = (value.T if transpose else value).astype(dtype)
        ok = jnp.all(jnp.isfinite(value))
        if destination is None:
            return value, ok
        return jax.lax.dynamic_update_index_in_dim(destination, value, layer, 0), ok

    everywhere = target
    if isinstance(target, NamedSharding):
        everywhere = NamedSharding(target.mesh, PartitionSpec())
    return jax.jit(place, donate_argnums=0, out_shardings=(target, everywhere))
