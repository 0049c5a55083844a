"""Training and serving of 8B models on TPU slices, compiled without the slices.

    python -m benchmarks.aot [--models NAME,...] [--slices NAME,...] [--programs NAME,...]

Writes docs/results/aot.json and aot.md, in which rows that are not asked for stay: per program and
slice the bytes of one device (arguments, temporaries, peak), FLOPs, bytes moved, what devices
exchange, and the roofline time. A program that does not fit a device's memory is shown so, also
where the compiler refuses it, and the command ends with status 1. Needs libtpu beside kvjax (`pip
install libtpu` is enough on a CPU; `JAX_PLATFORMS=cpu`).
Programs that take hours to compile are left out unless they are named.

Compiled are the programs with their TPU kernels. FLOPs are counted in the program without them, as
traced, so that loops count as often as they run; a loop whose count is data (blocks of attention
that are skipped) counts once, which leaves most of attention out: `attention_flops` says what it
comes to. The compiler's own count is no help: it takes every loop for one pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator
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
from benchmarks.vs_kvpress import commit
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
_BUDGET, _ROOM = 1024, 128
_DEVICES = 16
_COMMIT = commit()  # before results are written


def _mesh(part: Slice, **sizes: int) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=part.topology).devices
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES, (AxisType.Auto,) * len(shape))


def _training(name: str, model: ModelConfig, part: Slice) -> jax.stages.Traced:
    source = {"erase": "neighbour", "lengths": 3584} if name == "eraser" else {"text": "unused.txt"}
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """Prompts cut to a budget of 1024 entries per head, or one token for rows with such caches."""

    mesh: dict[str, int]
    rows: int
    prompt: int = 32 * 1024
    decodes: bool = False
    policy: kvjax.Policy = kvjax.policy("snapkv")

    def trace(self, model: ModelConfig, part: Slice) -> jax.stages.Traced:
        """The program for one slice."""
        mesh = _mesh(part, **self.mesh)
        sizes = {"rows": self.rows, "prompt": self.prompt, "capacity": _BUDGET + _ROOM}
        trace = trace_decode if self.decodes else trace_prefill
        return trace(model_shapes(model, mesh), mesh, self.policy, **sizes)


_CHUNK = 2048
_CHUNKED = kvjax.policy("snapkv", prefill="chunked", chunk=_CHUNK)
_SERVED = {
    "prefill": Serving(mesh={"data": 4, "tensor": 4}, rows=4),
    "decode": Serving(mesh={"data": 4, "tensor": 4}, rows=64, decodes=True),
    "prefill-128k": Serving(mesh={"sequence": 4, "tensor": 4}, rows=1, prompt=128 * 1024),
    "chunked-1m": Serving(
        mesh={"data": 2, "tensor": 8}, rows=2, prompt=1024 * 1024, policy=_CHUNKED
    ),
}
PROGRAMS = (*_TRAINED, *_SERVED)


def _traced(program: str, model: str, part: Slice, *, kernels: str) -> jax.stages.Traced:
    os.environ[dispatch.VARIABLE] = kernels
    jax.clear_caches()  # which implementation runs is chosen while tracing
    if program in _TRAINED:
        return _training(program, MODELS[model], part)
    return _SERVED[program].trace(MODELS[model], part)


def attention_flops(program: str, model: ModelConfig) -> float:
    """FLOPs of attention in one run of a program, on all devices, from its formula.

    2 H D T^2 for a row and layer, causal. A retention step has a teacher's pass, a student's, the
    student's again, and its backward pass (2.5 of a forward one). An IndexMem step has the
    indexer's pass, the prefill that evicts, the memory's pass with attention to everything and to
    what is left, and the teacher's logits (half of one). An eraser's step prefills, and recomputes
    what is behind the span: less than a second pass, and counted as one; span and reply are left
    out.
    """
    wide = model.num_layers * model.num_heads * model.head_dim
    if program in _TRAINED:
        passes = {"retention": 5.5, "indexmem": 4.5, "eraser": 2.0}[program]
        return passes * _TRAIN["batch"] * 2.0 * wide * _TRAIN["length"] ** 2
    served, slots = _SERVED[program], _BUDGET + _ROOM
    if served.decodes:
        return 0.0  # of one query it is dense, and counted
    if served.policy == _CHUNKED:
        return served.rows * 4.0 * wide * (slots + _CHUNK / 2) * served.prompt
    return served.rows * 2.0 * wide * served.prompt**2


def measured(program: str, model: str, name: str) -> dict[str, Any]:
    """What compilation says of one cell; see `completed`."""
    start = time.perf_counter()
    row: dict[str, Any] = {"model": model, "slice": name, "program": program}
    try:
        compiled = _traced(program, model, SLICES[name], kernels="tpu").lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        row["refused"] = str(error).splitlines()[0]
    else:
        text = compiled.as_text()
        memory, found = compiled.memory_analysis(), traffic(text)
        row |= {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
            "peak_bytes": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes,
            "kernels": text.count("tpu_custom_call"),
            "collectives": dict(found.count),
            "collective_bytes": found.total_bytes,
            "unknown_loops": found.unknown_loops,
            "flops": flops(_traced(program, model, SLICES[name], kernels="portable")) / _DEVICES,
        }
    return row | {
        "compile_seconds": time.perf_counter() - start,
        "commit": _COMMIT,
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu"),
    }


def completed(row: dict[str, Any]) -> dict[str, Any]:
    """A row with what follows from it: whether it fits, bytes moved, and the roofline time."""
    part = SLICES[row["slice"]]
    if "refused" in row:
        return row | {"fits": False}
    attention = attention_flops(row["program"], MODELS[row["model"]]) / _DEVICES
    # At least every argument is read once, and every temporary written and read.
    moved = row["argument_bytes"] + 2 * row["temporary_bytes"]
    times = {
        "compute": (row["flops"] + attention) / part.flops,
        "memory": moved / part.bandwidth,
        "network": row["collective_bytes"] / part.link,
    }
    return row | {
        "fits": row["peak_bytes"] <= part.memory,
        "attention_flops": attention,
        "moved_bytes": moved,
        "seconds": times,
        "roofline_seconds": max(times.values()),
        "bound_by": max(times, key=lambda kind: times[kind]),
    }


_ON_REQUEST = ("prefill-128k", "chunked-1m")  # which take hours to compile


def _cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    chosen = []
    for given, known, what in (
        (args.programs, PROGRAMS, "programs"),
        (args.models, MODELS, "models"),
        (args.slices, SLICES, "slices"),
    ):
        every = tuple(name for name in known if name not in _ON_REQUEST)
        names = every if given is None else tuple(given.split(","))
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
    facts = {f"jax {row['jax']}, libtpu {row['libtpu']}" for row in rows}
    lines = [
        "# 8B models on TPU slices of 16 chips, compiled without them",
        "",
        f"`python -m benchmarks.aot`; {'; '.join(sorted(facts))}. Of one chip. What the "
        "columns and the programs are: [what it costs on a pod](../scaling.md).",
        "",
        "| model | slice | program | arguments | temporaries | peak | fits | TFLOP | attention | "
        "moved | exchanged | compute, memory, network | bound by | commit |",
        "|---|---|---|--:|--:|--:|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        cells = [row["model"], row["slice"], row["program"]]
        if "refused" in row:
            lines.append(
                f"| {' | '.join(cells)} | | | | **no**: {row['refused']} | | | | | | | "
                f"{row['commit']} |"
            )
            continue
        memory = ("argument_bytes", "temporary_bytes", "peak_bytes")
        cells += [f"{row[name] / 2**30:.2f} GiB" for name in memory]
        exchanged = f"{row['collective_bytes'] / 2**30:.2f} GiB"
        cells += [
            "yes" if row["fits"] else "**no**",
            f"{row['flops'] / 1e12:.1f}",
            f"{row['attention_flops'] / 1e12:.1f}",
            f"{row['moved_bytes'] / 2**30:.2f} GiB",
            f"≥ {exchanged}" if row["unknown_loops"] else exchanged,
            ", ".join(f"{seconds * 1e3:.1f}" for seconds in row["seconds"].values()) + " ms",
            row["bound_by"],
            row["commit"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("models", "slices", "programs"):
        parser.add_argument(f"--{name}", metavar="NAME,...")
    parser.add_argument("--out", metavar="DIR", default="docs/results")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    written = out / "aot.json"
    known = json.loads(written.read_text(encoding="utf-8")) if written.exists() else []
    rows = {(row["program"], row["model"], row["slice"]): completed(row) for row in known}
    cells = list(_cells(args))
    for cell in cells:
        rows[cell] = completed(measured(*cell))
        in_order = sorted(rows.values(), key=_place)
        written.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
        (out / "aot.md").write_text(page(in_order), encoding="utf-8")
        print(page([rows[cell]]).splitlines()[-1], flush=True)
    return 0 if all(rows[cell]["fits"] for cell in cells) else 1


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    return (
        list(MODELS).index(row["model"]),
        list(SLICES).index(row["slice"]),
        PROGRAMS.index(row["program"]),
    )


if __name__ == "__main__":
    sys.exit(main())
