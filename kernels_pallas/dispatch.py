"""Which implementation an operation runs: by platform, by override, and why.

An implementation is a module of the operation's folder that defines the operation's function with
the reference's signature. `mosaic_tpu` and `mosaic_gpu` are Pallas kernels, each for one platform;
all others are plain JAX and run anywhere. The choice is made while a program is traced.

The environment variable KVJAX_KERNELS overrides the automatic choice, and has to be set before
programs are traced: `portable` leaves the kernels out, `tpu` and `gpu` choose as on that platform
(to compile for a device that is not there), and `name=implementation,...` settles single
operations.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

import jax

KERNELS = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}

VARIABLE = "KVJAX_KERNELS"


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


def takes_kernels() -> bool:
    """Whether the automatic choice looks for this platform's kernels here."""
    portable = os.environ.get(VARIABLE) == "portable"
    return platform() in KERNELS and not portable


def choices() -> dict[str, Choice]:
    """The last choice of every operation that this process has traced, by name."""
    return dict(_choices)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation's implementations: the modules of `package` that define function `name`."""

    name: str
    package: str
    implementations: tuple[str, ...]

    def __call__(
        self, *arguments: Any, implementation: str | None, portable: str, **options: Any
    ) -> Any:
        """Runs `implementation`, or of None the platform's kernel, or where it declines `portable`.

        A kernel declines with NotImplementedError and one sentence. A named one never falls back.

        Raises:
          ValueError: an unknown implementation, named here or in KVJAX_KERNELS.
          NotImplementedError: the named one does not serve these arguments.
        """
        if implementation is None:
            implementation, reason = self._override()
        else:
            reason = "asked for"
        if implementation is not None:
            result = self._module(implementation)(*arguments, **options)
            _choices[self.name] = Choice(implementation, reason)
            return result
        kernel = KERNELS.get(platform())
        if os.environ.get(VARIABLE) == "portable":
            reason = f"{VARIABLE}=portable"
        elif kernel is None:
            reason = f"no kernel for {platform()}"
        elif kernel not in self.implementations:
            reason = f"no {kernel} of this operation"
        else:
            try:
                result = self._module(kernel)(*arguments, **options)
            except NotImplementedError as declined:
                reason = f"{kernel}: {declined}"
            else:
                _choices[self.name] = Choice(kernel, f"the kernel for {platform()}")
                return result
        result = self._module(portable)(*arguments, **options)
        _choices[self.name] = Choice(portable, reason)
        return result

    def _override(self) -> tuple[str | None, str]:
        asked = os.environ.get(VARIABLE, "")
        if asked in ("", "portable", *KERNELS):
            return None, ""
        for entry in asked.split(","):
            name, equals, chosen = entry.strip().partition("=")
            if not equals:
                raise ValueError(
                    f"{VARIABLE}={asked!r}: allowed are 'portable', 'tpu', 'gpu' and "
                    "'operation=implementation,...'"
                )
            if name == self.name:
                return chosen, f"{VARIABLE}={asked}"
        return None, ""

    def _module(self, implementation: str) -> Any:
        if implementation not in self.implementations:
            allowed = ", ".join(map(repr, self.implementations))
            raise ValueError(f"implementation={implementation!r}: allowed are {allowed} and None")
        file = f"pallas_{implementation}" if implementation in KERNELS.values() else implementation
        return getattr(importlib.import_module(f"{self.package}.{file}"), self.name)
