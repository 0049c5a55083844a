"""How a Pallas kernel runs here: compiled on its own platform, simulated on any other.

The simulators are JAX's for TPU and GPU: they check the order of copies and reads out of bounds
besides the values. `interpreting(detect_races=True)` looks for data races too.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.extend

from kernels_pallas import dispatch

_settings: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "settings", default=MappingProxyType({})
)


@contextlib.contextmanager
def interpreting(**settings: Any) -> Iterator[None]:
    """Passes `settings` to the simulators of kernels traced inside."""
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


def tpu_interpret() -> Any:
    """`interpret=` of a TPU kernel."""
    if dispatch.platform() == "tpu":
        return False
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(**_settings.get())


def gpu_interpret() -> Any:
    """`interpret=` of a GPU kernel."""
    if dispatch.platform() == "gpu":
        return False
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(**_settings.get())


def decline_wrong_masks() -> None:
    """Declines for GPU kernels with causal masks where CUDA compiles such masks wrongly.

    That is from CUDA 12.8 until before 12.9.1; JAX's own attention kernel refuses there too.
    """
    found = re.search(r"cuda (\d+)", jax.extend.backend.get_backend().platform_version)
    version = int(found[1]) if found else 0
    if 12080 <= version < 12091:
        raise NotImplementedError(
            f"CUDA {version // 1000}.{version % 1000 // 10}.{version % 10} compiles causal masks "
            "wrongly: allowed are versions before 12.8 and from 12.9.1"
        )
