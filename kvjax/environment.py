"""What kvjax runs on: versions, processes, devices, and the kernels that operations take here."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = (
    "kvjax", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint",
    "grain", "numpy",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Python and the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def devices() -> dict[str, str]:
    """Processes and devices of this run, and the memory of one device where it says."""
    import jax

    local, everywhere = jax.local_devices(), jax.devices()
    kinds = sorted({device.device_kind for device in everywhere})
    found = {
        "platform": local[0].platform,
        "devices": f"{len(everywhere)} x {', '.join(kinds)}",
        "processes": f"{jax.process_count()}, {len(local)} devices in this one",
    }
    if (coordinates := getattr(local[0], "coords", None)) is not None:
        corners = [device.coords for device in everywhere]
        extent = [max(axis) + 1 for axis in zip(*corners, strict=True)]
        found["topology"] = "x".join(map(str, extent)) + f", this process at {tuple(coordinates)}"
    if limit := (local[0].memory_stats() or {}).get("bytes_limit"):
        found["memory"] = f"{limit / 2**30:.1f} GiB of a device"
    return found
