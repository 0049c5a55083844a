"""Training and serving of 8B models on TPU slices, compiled without the slices.

    python -m benchmarks.aot [--models NAME,...] [--slices NAME,...] [--programs NAME,...]

Writes docs/results/aot.json and aot.md: per program and slice the bytes of one device (arguments,
temporaries, peak), FLOPs, what devices exchange, and the roofline time. A program that does not
fit a device's memory is shown so, and the command ends with status 1. Needs libtpu beside kvjax
(`pip install libtpu` is enough on a CPU; `JAX_PLATFORMS=cpu`).

Compiled are the programs with their TPU kernels. FLOPs are counted in the program without them, as
traced, so that loops count as often as they run; a loop whose count is data (blocks of attention
that are skipped) counts once, which leaves most of attention out. The compiler's own count is no
help: it takes every loop for one pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for _name, _value in (
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("TPU_ACCELERATOR_TYPE", "v5litepod-16"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
):
    os.environ.setdefault(_name, _value)

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import kvjax
from benchmarks.flops import flops
from benchmarks.hlo import traffic
from benchmarks.serving import trace_decode, trace_prefill
from kernels_pallas import dispatch
from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.sharding import MESH_AXES
from train.abstract import model_shapes, trace_step
from train.config import from_mapping

MODELS = {
    "llama-3.1-8b": ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, max_length=131072, rope=RopeConfig(theta=5e5),
    ),
    "qwen3-8b": ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288,
        num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, max_length=40960, qk_norm=True,
        rope=RopeConfig(theta=1e6),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A TPU slice; numbers of one chip from its data sheet."""

    topology: str
    memory: float  # bytes
    flops: float  # per second, bfloat16
    bandwidth: float  # bytes per second of HBM
    link: float  # bytes per second to other chips, all links


SLICES = {
    "v5e-16": Slice(topology="v5e:4x4", memory=16e9, flops=197e12, bandwidth=819e9, link=200e9),
    "v5p-32": Slice(topology="v5p:2x2x4", memory=95e9, flops=459e12, bandwidth=2765e9, link=600e9),
    "v6e-16": Slice(topology="v6e:4x4", memory=32e9, flops=918e12, bandwidth=1640e9, link=448e9),
}

_TRAINED: dict[str, dict[str, Any]] = {
    "retention": {"kind": "retention", "gate": "rg10", "width": 512, "memory": 256},
    "indexmem": {"kind": "indexmem"},
    "eraser": {"kind": "eraser"},
}
_TRAIN = {"length": 4096, "batch": 16}
_PROMPT, _BUDGET, _ROOM = 32768, 1024, 128


def _mesh(part: Slice, **sizes: int) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=part.topology).devices
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, (AxisType.Auto,) * len(shape))


def _training(name: str, model: ModelConfig, part: Slice) -> jax.stages.Traced:
    source = {"erase": "neighbour"} if name == "eraser" else {"text": "unused.txt"}
    config = from_mapping(
        {
            "model": "of these shapes",
            "module": _TRAINED[name],
            "data": [source],
            "steps": 1000,
            **_TRAIN,
        }
    )
    mesh = _mesh(part, fsdp=16)
    return trace_step(config, model_shapes(model, mesh), mesh)


def _serving(name: str, model: ModelConfig, part: Slice) -> jax.stages.Traced:
    """Prompts of 32K tokens cut to 1024 entries, or one token for each of 64 such caches."""
    mesh = _mesh(part, data=4, tensor=4)
    trace, rows = (trace_prefill, 4) if name == "prefill" else (trace_decode, 64)
    return trace(
        model_shapes(model, mesh),
        mesh,
        kvjax.policy("snapkv"),
        rows=rows,
        prompt=_PROMPT,
        capacity=_BUDGET + _ROOM,
    )


PROGRAMS: dict[str, Callable[[str, ModelConfig, Slice], jax.stages.Traced]] = {
    **dict.fromkeys(_TRAINED, _training),
    "prefill": _serving,
    "decode": _serving,
}


def _traced(program: str, model: str, part: Slice, *, kernels: str) -> jax.stages.Traced:
    os.environ[dispatch.VARIABLE] = kernels
    jax.clear_caches()  # which implementation runs is chosen while tracing
    return PROGRAMS[program](program, MODELS[model], part)


def measured(program: str, model: str, name: str) -> dict[str, Any]:
    """One row of the table."""
    part = SLICES[name]
    start = time.perf_counter()
    compiled = _traced(program, model, part, kernels="tpu").lower().compile()
    text = compiled.as_text()
    memory, found = compiled.memory_analysis(), traffic(text)
    devices = 16
    work = flops(_traced(program, model, part, kernels="portable")) / devices
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    # At least every argument is read once, and every temporary written and read.
    moved = memory.argument_size_in_bytes + 2 * memory.temp_size_in_bytes
    times = {
        "compute": work / part.flops,
        "memory": moved / part.bandwidth,
        "network": found.total_bytes / part.link,
    }
    return {
        "model": model,
        "slice": name,
        "program": program,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "peak_bytes": peak,
        "fits": peak <= part.memory,
        "flops": work,
        "kernels": text.count("tpu_custom_call"),
        "collectives": dict(found.count),
        "collective_bytes": found.total_bytes,
        "unknown_loops": found.unknown_loops,
        "roofline_seconds": max(times.values()),
        "bound_by": max(times, key=lambda kind: times[kind]),
        "compile_seconds": time.perf_counter() - start,
    }


def _cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    chosen = []
    for given, known, what in (
        (args.programs, PROGRAMS, "programs"),
        (args.models, MODELS, "models"),
        (args.slices, SLICES, "slices"),
    ):
        names = tuple(known) if given is None else tuple(given.split(","))
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"--{what}={unknown[0]!r}: allowed: {', '.join(known)}")
        chosen.append(names)
    programs, models, slices = chosen
    for model in models:
        for name in slices:
            for program in programs:
                yield program, model, name


def page(rows: list[dict[str, Any]]) -> str:
    """The table as markdown."""
    lines = [
        "| model | slice | program | arguments | temporaries | peak | fits | TFLOP | exchanged | "
        "roofline | bound by |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = [f"{row[n] / 2**30:.2f} GiB" for n in ("argument_bytes", "temporary_bytes")]
        lines.append(
            f"| {row['model']} | {row['slice']} | {row['program']} | {sizes[0]} | {sizes[1]} | "
            f"{row['peak_bytes'] / 2**30:.2f} GiB | {'yes' if row['fits'] else '**no**'} | "
            f"{row['flops'] / 1e12:.1f} | {row['collective_bytes'] / 2**30:.2f} GiB | "
            f"{row['roofline_seconds'] * 1e3:.1f} ms | {row['bound_by']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("models", "slices", "programs"):
        parser.add_argument(f"--{name}", metavar="NAME,...")
    parser.add_argument("--out", metavar="DIR", default="docs/results")
    args = parser.parse_args()
    rows = []
    for cell in _cells(args):
        rows.append(measured(*cell))
        print(page(rows[-1:]).splitlines()[-1], flush=True)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "aot.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (out / "aot.md").write_text(page(rows), encoding="utf-8")
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
