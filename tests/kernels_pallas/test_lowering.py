"""What kernels ask about the machine before they run."""

from __future__ import annotations

import types

import jax.extend
import pytest

from kernels_pallas import lowering


def on(monkeypatch, version: str) -> None:
    backend = types.SimpleNamespace(platform_version=version)
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda: backend)


@pytest.mark.parametrize("version", ["cuda 12080", "PJRT C API\ncuda 12090"])
def test_masked_kernels_decline_a_cuda_that_compiles_masks_wrongly(monkeypatch, version):
    on(monkeypatch, version)
    with pytest.raises(NotImplementedError, match=r"CUDA 12\.[89]\.0"):
        lowering.decline_wrong_masks()


@pytest.mark.parametrize("version", ["cpu", "cuda 12060", "cuda 12091", "cuda 13000", "libtpu"])
def test_others_are_served(monkeypatch, version):
    on(monkeypatch, version)
    lowering.decline_wrong_masks()
