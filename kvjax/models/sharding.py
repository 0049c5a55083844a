"""Where each logical axis of a parameter or activation lies on a device mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.models.config import ModelConfig
from kvjax.models.layout import Parameter, layout

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
type MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Logical axis -> mesh axis or axes. Mesh axes that a mesh lacks are ignored.

    The first four name activation axes, the others parameter axes. The key and value heads of
    a cache follow `kv_heads`.
    """

    batch: MeshAxes = ("data", "fsdp")
    tokens: MeshAxes = "sequence"
    heads: MeshAxes = "tensor"
    features: MeshAxes = None
    layers: MeshAxes = None
    embed: MeshAxes = "fsdp"
    vocab: MeshAxes = "tensor"
    query_heads: MeshAxes = "tensor"
    kv_heads: MeshAxes = "tensor"
    head_dim: MeshAxes = None
    mlp: MeshAxes = "tensor"

    def spec(
        self, axes: tuple[str | None, ...], units: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> PartitionSpec:
        """The partition of an array with these logical axes.

        An axis whose `units` (indivisible pieces, such as heads) the mesh axes do not divide is
        replicated: 9 heads on 2 devices stay whole instead of being cut inside a head.
        """
        parts: list[MeshAxes] = []
        used: set[str] = set()
        for axis, count in zip(axes, units, strict=True):
            target = None if axis is None else getattr(self, axis)
            names = (target,) if isinstance(target, str) else tuple(target or ())
            names = tuple(name for name in names if name in mesh.shape and name not in used)
            if not names or count % math.prod(mesh.shape[name] for name in names):
                parts.append(None)
                continue
            used.update(names)
            parts.append(names[0] if len(names) == 1 else names)
        return PartitionSpec(*parts)


def make_mesh(**sizes: int) -> Mesh:
    """A mesh with the axes data, fsdp, tensor, sequence of the given sizes (default 1).

    Axis types are Auto: the compiler propagates shardings from the parameters. Raises
    `ValueError` for an unknown axis or when there are fewer devices than the mesh needs.
    """
    if unknown := sorted(set(sizes) - set(MESH_AXES)):
        raise ValueError(f"mesh axis {unknown[0]!r}: allowed are {', '.join(MESH_AXES)}")
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    if math.prod(shape) > jax.device_count():
        raise ValueError(
            f"a mesh of {math.prod(shape)} devices: {jax.device_count()} devices are available"
        )
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, MESH_AXES, (AxisType.Auto,) * len(shape), devices=devices)


def parameter_sharding(
    parameter: Parameter, mesh: Mesh, rules: ShardingRules | None = None
) -> NamedSharding:
    """The sharding of one row of the layout table."""
    rules = rules or ShardingRules()
    return NamedSharding(mesh, rules.spec(parameter.axes, parameter.units, mesh))


def parameter_shardings(
    config: ModelConfig, mesh: Mesh, rules: ShardingRules | None = None
) -> Mapping[str, NamedSharding]:
    """The sharding of every parameter by name; `Decoder.shardings` gives them as a decoder."""
    return {row.name: parameter_sharding(row, mesh, rules) for row in layout(config)}
