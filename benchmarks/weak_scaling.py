"""What one device holds, computes and exchanges as devices grow and the load of each stays.

    python -m benchmarks.weak_scaling [--devices 8,64,256] [--programs NAME,...] [--small]

Programs are compiled for simulated CPU devices from shapes alone; nothing runs, so this says
nothing of time. A program whose bytes or FLOPs per device grow by more than 5 % from the first
number of devices to a larger one ends the command with status 1. Writes weak_scaling.json and .md.

FLOPs are counted twice: in the traced program, with loops as often as they run, over the number of
devices; and by the compiler, for the program of one device, with every loop taken for one pass.
The second sees work that every device repeats.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import kvjax
from benchmarks.flops import flops
from benchmarks.hlo import traffic
from benchmarks.serving import trace_decode
from benchmarks.vs_kvpress import commit, machine
from kvjax.models.config import ModelConfig
from kvjax.models.sharding import make_mesh
from train.abstract import model_shapes, trace_step
from train.config import from_mapping

LIMIT = 1.05
# Machine code that is never run need not be fast: compilation then takes half the time.
NOTHING_RUNS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
JUDGED = ("argument_bytes", "temporary_bytes", "peak_bytes", "flops", "compiled_flops")

MODEL = ModelConfig(
    vocab_size=32768, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32,
    num_kv_heads=8, head_dim=64, max_length=8192,
)  # fmt: skip
SMALL = ModelConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8,
    num_kv_heads=4, head_dim=8,
)  # fmt: skip
LENGTH, BUDGET = 2048, 1024  # tokens of a row that is trained, entries of one that is decoded


def training(model: ModelConfig, mesh: Mesh) -> jax.stages.Traced:
    """Retention gates, one row of tokens per device."""
    small = model is SMALL
    config = from_mapping(
        {
            "model": "of these shapes",
            "module": {"kind": "retention", "width": 512, "memory": 8 if small else 256},
            "data": [{"text": "unused.txt"}],
            "steps": 1000,
            "length": 64 if small else LENGTH,
            "batch": mesh.size,
        }
    )
    return trace_step(config, model_shapes(model, mesh, jnp.float32), mesh)


def decoding(model: ModelConfig, mesh: Mesh) -> jax.stages.Traced:
    """One token for each of four rows per group of tensor devices, and one entry evicted."""
    decoder = model_shapes(model, mesh, jnp.float32)
    budget = 16 if model is SMALL else BUDGET
    rows = 4 * mesh.shape["data"]
    policy = kvjax.policy("h2o")
    return trace_decode(decoder, mesh, policy, rows=rows, prompt=budget, capacity=budget + 1)


type Trace = Callable[[ModelConfig, Mesh], jax.stages.Traced]
PROGRAMS: dict[str, tuple[Trace, Mapping[str, int]]] = {  # and the axes that do not grow
    "train-data": (training, {}),
    "train-fsdp": (training, {"fsdp": 8}),
    "decode": (decoding, {"tensor": 4}),
}


def measured(program: str, model: ModelConfig, devices: int) -> dict[str, Any]:
    """One row of the table."""
    trace, fixed = PROGRAMS[program]
    inner = max(fixed.values(), default=1)
    mesh = make_mesh(data=devices // inner, **fixed)
    traced = trace(model, mesh)
    compiled = traced.lower().compile(NOTHING_RUNS)
    memory, found = compiled.memory_analysis(), traffic(compiled.as_text())
    return {
        "program": program,
        "devices": devices,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        "flops": flops(traced) / devices,
        "compiled_flops": compiled.cost_analysis()["flops"],
        "collectives": dict(found.count),
        "collective_bytes": dict(found.bytes),
        "unknown_loops": found.unknown_loops,
    }


def growth(rows: list[dict[str, Any]]) -> list[str]:
    """What grows beyond the limit, in words."""
    first: dict[str, dict[str, Any]] = {}
    return [
        f"{row['program']}: {name} of {row['devices']} devices is {ratio(row, base, name):.3f} "
        f"times that of {base['devices']}"
        for row in rows
        for base in [first.setdefault(row["program"], row)]
        for name in JUDGED
        if ratio(row, base, name) > LIMIT
    ]


def ratio(row: dict[str, Any], base: dict[str, Any], name: str) -> float:
    return float(row[name]) / base[name] if base[name] else 1.0


def page(report: dict[str, Any]) -> str:
    """The report as markdown."""
    lines = [
        "# Weak scaling",
        "",
        f"`{report['command']}` at commit `{report['commit']}`, jax {report['jax']}; compiled for "
        f"simulated devices on {report['machine']}, float32.",
        "",
        f"{report['about']} Every number is of one device; in brackets the ratio to the first row.",
        "",
        "| program | devices | mesh | arguments | temporaries | peak | GFLOP | compiler's count |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, dict[str, Any]] = {}
    for row in report["rows"]:
        base = first.setdefault(row["program"], row)
        sizes = [
            f"{row[name] / unit:.1f}{what} ({ratio(row, base, name):.3f})"
            for name, unit, what in (
                ("argument_bytes", 2**20, " MiB"),
                ("temporary_bytes", 2**20, " MiB"),
                ("peak_bytes", 2**20, " MiB"),
                ("flops", 1e9, ""),
                ("compiled_flops", 1e9, ""),
            )
        ]
        lines.append(f"| {_name(row)} | {' | '.join(sizes)} |")
    lines += [
        "",
        "What a device exchanges in one step: collectives, as often as the loops around them run, "
        "and MiB of their results.",
        "",
        "| program | devices | mesh | exchanged | all |",
        "|---|---|---|---|---|",
    ]
    first = {}
    for row in report["rows"]:
        kinds = ", ".join(
            f"{row['collectives'][kind]} {kind} ({size / 2**20:.2f})"
            for kind, size in sorted(row["collective_bytes"].items())
        )
        total = sum(row["collective_bytes"].values())
        base = sum(first.setdefault(row["program"], row)["collective_bytes"].values())
        share = f" ({total / base:.3f})" if base else ""
        lines.append(f"| {_name(row)} | {kinds} | {total / 2**20:.2f} MiB{share} |")
    grown = report["growth"]
    lines += ["", "Nothing grows by more than 5 %." if not grown else "**Grows beyond 5 %:**", ""]
    return "\n".join([*lines, *(f"* {line}" for line in grown), *([""] if grown else [])])


def _name(row: dict[str, Any]) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items())
    return f"{row['program']} | {row['devices']} | {mesh}"


def _about(model: ModelConfig) -> str:
    return (
        f"A decoder of {model.num_layers} layers, width {model.hidden_size}, {model.num_heads} "
        f"query and {model.num_kv_heads} KV heads. `train-data` and `train-fsdp` are the training "
        "step of retention gates with one row of tokens per device, the model on every device or "
        "over 8 of them; `decode` is a step of H2O within its budget, 4 rows per 4 devices."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", metavar="N,...", default="8,64,256")
    parser.add_argument("--programs", metavar="NAME,...", default=",".join(PROGRAMS))
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the command")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    counts, programs = [int(count) for count in args.devices.split(",")], args.programs.split(",")
    if unknown := [name for name in programs if name not in PROGRAMS]:
        parser.error(f"--programs={unknown[0]!r}: allowed: {', '.join(PROGRAMS)}")
    if wrong := [count for count in counts if count < 8 or count % 8]:
        parser.error(f"--devices={wrong[0]}: allowed: multiples of 8")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(counts))
    model = SMALL if args.small else MODEL
    rows = []
    for program in programs:
        for count in counts:
            rows.append(measured(program, model, count))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    report = {
        "command": " ".join(["python -m benchmarks.weak_scaling", *sys.argv[1:]]),
        "commit": commit(),
        "jax": jax.__version__,
        "machine": machine(),
        "about": _about(model),
        "rows": rows,
        "growth": growth(rows),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "weak_scaling.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    (args.out / "weak_scaling.md").write_text(page(report), encoding="utf-8")
    print(page(report))
    return 1 if report["growth"] else 0


if __name__ == "__main__":
    sys.exit(main())
