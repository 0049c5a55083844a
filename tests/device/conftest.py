"""Runs kernels on the accelerator of this machine: benchmarks/device_check.sh."""

from __future__ import annotations

import jax
import pytest

PLATFORM = jax.default_backend()


def pytest_configure(config: pytest.Config) -> None:
    if PLATFORM not in ("gpu", "tpu"):
        raise pytest.UsageError(
            f"JAX found {jax.devices()[0].device_kind!r} here: tests/device needs a GPU or a TPU"
        )
    if PLATFORM == "gpu" and jax.devices()[0].compute_capability != "9.0":
        raise pytest.UsageError(
            f"{jax.devices()[0].device_kind} is not a Hopper: the GPU kernels are for sm_90a"
        )
