"""Which implementation an operation runs: by platform, by override, and why.

An implementation is a module of the operation's folder that defines the operation's function with
the reference's signature. `mosaic_tpu` and `mosaic_gpu` are Pallas kernels, each for one platform;
all others are plain JAX and run anywhere. The choice is made while a program is traced.

The environment variable KVJAX_KERNELS overrides the automatic choice, and has to be set before
programs are traced: `portable` leaves the kernels out, `tpu` and `gpu` choose as on that platform
(to compile for a device that is not there), and `name=implementation,...` settles single
operations, which OPERATIONS names.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

KERNELS = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}

VARIABLE = "KVJAX_KERNELS"

# By name, as the functions that users call: one list, because their modules are loaded when needed.
OPERATIONS = (
    "attention",
    "causal_attention",
    "column_attention",
    "compact",
    "competing_threshold",
    "decode_attention",
    "decode_mass",
    "keep_mask",
    "memory_read",
    "memory_update",
    "occupancy",
    "occupancy_at",
    "paged_attention",
    "paged_mass",
    "pooled_max",
    "removal_error",
    "retention_attention",
    "segment_attention",
    "window_moments",
    "window_scores",
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What an operation took the last time it was traced."""

    implementation: str
    reason: str


_choices: dict[str, Choice] = {}


def platform() -> str:
    """The platform to choose kernels for: "tpu", "gpu", or another that has none."""
    asked = os.environ.get(VARIABLE, "")
    return asked if asked in KERNELS else jax.default_backend()


def choices() -> dict[str, Choice]:
    """The last choice of every operation that this process has traced, by name."""
    return dict(_choices)


def decline_device(implementation: str) -> None:
    """Declines where this machine's GPU is one that the GPU kernels do not run on.

    They are compiled with instructions of Hopper alone. KVJAX_KERNELS=gpu is for a GPU that is
    not there, and on other platforms the kernels are simulated.
    """
    if implementation != KERNELS["gpu"] or jax.default_backend() != "gpu":
        return
    if os.environ.get(VARIABLE) == "gpu":
        return
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        raise NotImplementedError(
            f"the GPU kernels are for Hopper (sm_90a), this is {device.device_kind} of compute "
            f"capability {capability}"
        )


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation's implementations: the modules of `package` that define function `name`.

    `kernels` names the one of each platform that has its own.
    """

    name: str
    package: str
    implementations: tuple[str, ...]
    kernels: Mapping[str, str] = dataclasses.field(default_factory=lambda: KERNELS)

    def __post_init__(self) -> None:
        if self.name not in OPERATIONS:
            raise ValueError(f"operation {self.name!r}: name it in dispatch.OPERATIONS")

    def __call__(
        self, *arguments: Any, implementation: str | None, portable: str, **options: Any
    ) -> Any:
        """Runs `implementation`, or of None the platform's kernel, or where it declines `portable`.

        A kernel declines with NotImplementedError and one sentence. A named one never falls back.

        Raises:
          ValueError: an unknown implementation, named here or in KVJAX_KERNELS, or an unknown
            operation there.
          NotImplementedError: the named one does not serve these arguments.
        """

        def run(chosen: str) -> Any:
            return self._function(chosen)(*arguments, **options)

        return self.choose(run, implementation=implementation, portable=portable)

    def choose(
        self, run: Callable[[str], Any], *, implementation: str | None, portable: str
    ) -> Any:
        """The same for any `run(implementation)`."""
        if implementation is None:
            implementation, reason = self._override()
        else:
            reason = "asked for"
        if implementation is not None:
            return self._run(run, implementation, reason)
        here = platform()
        kernel = self.kernels.get(here)
        if os.environ.get(VARIABLE) == "portable":
            reason = f"{VARIABLE}=portable"
        elif here not in self.kernels:
            reason = f"no kernel for {here}"
        elif kernel not in self.implementations:
            reason = f"no {kernel} of this operation"
        else:
            try:
                return self._run(run, kernel, f"the kernel for {here}")
            except NotImplementedError as declined:
                reason = f"{kernel}: {declined}"
        return self._run(run, portable, reason)

    def _run(self, run: Callable[[str], Any], implementation: str, reason: str) -> Any:
        if implementation not in self.implementations:
            allowed = ", ".join(map(repr, self.implementations))
            raise ValueError(f"implementation={implementation!r}: allowed are {allowed} and None")
        decline_device(implementation)
        result = run(implementation)
        _choices[self.name] = Choice(implementation, reason)
        return result

    def _override(self) -> tuple[str | None, str]:
        asked = os.environ.get(VARIABLE, "")
        if asked in ("", "portable", *KERNELS):
            return None, ""
        found = None
        for entry in asked.split(","):
            name, equals, chosen = entry.strip().partition("=")
            if not equals:
                raise ValueError(
                    f"{VARIABLE}={asked!r}: allowed are 'portable', 'tpu', 'gpu' and "
                    "'operation=implementation,...'"
                )
            if name not in OPERATIONS:
                raise ValueError(
                    f"{VARIABLE}={asked!r} names operation {name!r}: allowed are "
                    f"{', '.join(OPERATIONS)}"
                )
            if name == self.name:
                found = chosen
        return found, f"{VARIABLE}={asked}"

    def _function(self, implementation: str) -> Any:
        file = f"pallas_{implementation}" if implementation in KERNELS.values() else implementation
        return getattr(importlib.import_module(f"{self.package}.{file}"), self.name)
