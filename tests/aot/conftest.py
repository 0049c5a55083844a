"""Compiles for accelerators that are not there: `make test-aot`.

Each platform has an environment and a process of its own; KVJAX_KERNELS says which, "tpu" or
"gpu".
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PLATFORM = os.environ.get("KVJAX_KERNELS", "")

# Before JAX starts.
os.environ["JAX_PLATFORMS"] = "cpu"
if PLATFORM == "tpu":
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
else:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    use_abstract_mesh,
)

TARGETS = {"tpu": ("v5e", "v6e"), "gpu": ("h200",)}.get(PLATFORM, ())
_TPU_TOPOLOGY = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
_TPU_KIND = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}


def pytest_configure(config: pytest.Config) -> None:
    if PLATFORM not in ("tpu", "gpu"):
        raise pytest.UsageError(
            f"KVJAX_KERNELS={PLATFORM!r}: tests/aot runs with 'tpu' or 'gpu', see make test-aot"
        )
    config.addinivalue_line("markers", "newest: compiled for the newest target alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked `newest` to the newest target: compiling them for more takes minutes."""

    def older(item: pytest.Item) -> bool:
        if item.get_closest_marker("newest") is None:
            return False
        return item.callspec.params.get("compile_for", TARGETS[-1]) != TARGETS[-1]

    config.hook.pytest_deselected(items=[item for item in items if older(item)])
    items[:] = [item for item in items if not older(item)]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program."""

    temporary_bytes: int
    aliased_bytes: int
    argument_bytes: int
    output_bytes: int
    registers: tuple[int, ...]  # per thread of each GPU kernel
    spilled_bytes: int  # of registers
    text: str  # the compiled program


def _devices(target: str) -> tuple[list[Any], AbstractDevice]:
    """Four devices, and what kind they are of."""
    if target == "h200":
        described = topologies.get_topology_desc(
            platform="cuda",
            target_config=(Path(__file__).parent / "h200.txtpb").read_text(),
            topology="1x1x4",
        )
        kind = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    else:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=_TPU_TOPOLOGY[target]
        )
        kind = AbstractDevice(device_kind=_TPU_KIND[target], num_cores=1, platform="tpu")
    return list(described.devices), kind


@pytest.fixture(params=TARGETS)
def compile_for(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Compiled]:
    """Compiles `function(*specs)` for one target; specs are pytrees of `jax.ShapeDtypeStruct`.

    With `over`, a `PartitionSpec` for each of the flattened specs, for two by two devices named
    `data` and `tensor`.
    """
    devices, kind = _devices(request.param)

    def compile_program(
        function: Callable[..., Any],
        *specs: Any,
        donate: tuple[int, ...] = (),
        over: Sequence[PartitionSpec] | None = None,
    ) -> Compiled:
        leaves, tree = jax.tree.flatten(specs)
        placed: Sequence[Sharding] = [SingleDeviceSharding(devices[0])] * len(leaves)
        context = AbstractMesh((), (), abstract_device=kind)
        if over is not None:
            kinds = (AxisType.Auto, AxisType.Auto)
            mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"), kinds)
            context = mesh.abstract_mesh
            placed = [NamedSharding(mesh, spec) for spec in over]
        arguments = tree.unflatten(
            jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where)
            for spec, where in zip(leaves, placed, strict=True)
        )
        with use_abstract_mesh(context):
            lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        printed = "".join(capfd.readouterr())
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", printed)]
        return Compiled(
            temporary_bytes=memory.temp_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            registers=tuple(int(n) for n in re.findall(r"Used (\d+) registers", printed)),
            spilled_bytes=sum(spills),
            text=compiled.as_text(),
        )

    return compile_program
