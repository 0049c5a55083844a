"""What the machine of a benchmark can do, and everything else that a reader has to know of it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from benchmarks.kernel_sizes import Case

ROOT = Path(__file__).resolve().parents[1]

# By device kind: bytes and bfloat16 FLOPs per second, and bytes of memory.
DATA_SHEETS = {
    "NVIDIA H200": (4.8e12, 989e12, 141e9),
    "TPU v5 lite": (819e9, 197e12, 16e9),
    "TPU v5e": (819e9, 197e12, 16e9),
    "TPU v6 lite": (1.64e12, 918e12, 32e9),
    "TPU v6e": (1.64e12, 918e12, 32e9),
    "TPU v5": (2.765e12, 459e12, 95e9),
    "TPU v5p": (2.765e12, 459e12, 95e9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What a call's time is compared with."""

    device: str
    bandwidth: float  # bytes per second
    flops: float  # per second
    memory: float  # bytes
    source: str  # of these numbers

    def limit(self, case: Case) -> float:
        """Seconds that the bytes or the FLOPs take at least."""
        return max(case.bytes / self.bandwidth, case.flops / self.flops)


def this_machine(quick: bool = False) -> Machine:
    """Data-sheet numbers of a known accelerator; on others measured ones."""
    device = jax.devices()[0]
    for kind, (bandwidth, flops, memory) in DATA_SHEETS.items():
        if device.device_kind == kind:
            return Machine(
                device=kind, bandwidth=bandwidth, flops=flops, memory=memory, source="data sheet"
            )
    numbers, rows = (2**20, 256) if quick else (2**26, 2048)
    array = jnp.ones(numbers, jnp.float32)
    square = jnp.ones((rows, rows), jnp.float32)
    copy = fastest(jax.jit(lambda x: x + jnp.float32(1)), array)
    product = fastest(jax.jit(jnp.matmul), square, square)
    return Machine(
        device=device.device_kind if device.platform != "cpu" else processor(),
        bandwidth=2 * array.nbytes / copy,
        flops=2 * rows**3 / product,
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        source="copy and float32 product, measured in this run",
    )


def fastest(program: Any, *arguments: Any) -> float:
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)


def processor() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def circumstances(machine: Machine) -> dict[str, Any]:
    """Everything that a reader needs to repeat the run."""
    return {
        **dataclasses.asdict(machine),
        "driver": driver(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": spoken("git", "rev-parse", "--short", "HEAD") or "unknown",
        "changed": bool(spoken("git", "status", "--porcelain", "--", "kernels_pallas")),
    }


def driver() -> str:
    if jax.default_backend() == "gpu":
        asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        return spoken(*asked).split("\n")[0]
    version: str = jax.devices()[0].client.platform_version
    return " ".join(version.split())[:80]


def spoken(*words: str) -> str:
    """What a command prints; nothing where it is not there."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
