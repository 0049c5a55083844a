"""How fast each kernel is, next to its definition and to what the machine can do.

    python -m benchmarks.kernels                       # all operations, where a GPU or TPU is
    python -m benchmarks.kernels --operation pooled_max
    python -m benchmarks.kernels --small               # tiny sizes, on a CPU in seconds

Implementations of one size are compiled, warmed up and then timed in turn, so that what else the
machine does meets all of them. A sample is one call, or as many calls in a row as take 2 ms, until
the last result is there; the host's dispatch is part of it. Writes kernels.json and kernels.md.

The limit is the larger of bytes over bandwidth and FLOPs over the bfloat16 peak: of the data sheet
on a known device, and on a CPU of a copy and a product measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_machine import ROOT, Machine, circumstances, this_machine
from benchmarks.kernel_operations import OPERATIONS, Operation
from benchmarks.kernel_sizes import Case

SAMPLE_SECONDS = 2e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation at one size; without seconds where it was not timed, and why."""

    operation: str
    size: str
    implementation: str
    note: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)
    limit: float = 0.0  # seconds
    bytes: float = 0.0
    flops: float = 0.0
    temporary_bytes: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    timed = [name for name, operation in OPERATIONS.items() if operation.sizes]
    parser.add_argument("--operation", choices=timed, action="append")
    parser.add_argument("--small", action="store_true", help="one tiny size of each")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no size after these")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    began = time.monotonic()
    machine = this_machine(quick=arguments.small)
    rows: list[Row] = []
    for name, size, shape in in_turn(arguments.operation or timed, arguments.small):
        if time.monotonic() - began > arguments.seconds:
            note = f"left out: {arguments.seconds:.0f} s had passed"
            rows.append(Row(operation=name, size=size, implementation="all", note=note))
            continue
        rows += measure(name, OPERATIONS[name], size, shape, machine, arguments.samples)
        print(f"{time.monotonic() - began:6.1f} s  {name} {size}", flush=True)
    rows.sort(key=lambda row: list(OPERATIONS).index(row.operation))
    text = page(rows, machine)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "kernels.md").write_text(text)
    report = {"circumstances": circumstances(machine), "rows": [in_numbers(row) for row in rows]}
    (arguments.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
    print(text)


def in_turn(names: list[str], small: bool) -> list[tuple[str, str, Any]]:
    """Sizes to time, the first of every operation before any second one: time may run out."""
    listed = [
        (place, name, size, shape)
        for name in names
        for place, (size, shape) in enumerate(
            {"small": OPERATIONS[name].small}.items() if small else OPERATIONS[name].sizes.items()
        )
        if OPERATIONS[name].sizes
    ]
    return [entry[1:] for entry in sorted(listed, key=lambda entry: entry[0])]


def measure(
    name: str, operation: Operation, size: str, shape: Any, machine: Machine, samples: int
) -> list[Row]:
    """Every implementation of an operation at one size."""
    function = operation.load()
    if function is None:
        note = f"not there: {operation.function}"
        return [Row(operation=name, size=size, implementation="all", note=note)]
    case = operation.case(function, shape)
    arguments = jax.block_until_ready(jax.jit(case.make)(jax.random.key(0)))
    rows: dict[str, Row] = {}
    ready: dict[str, Callable[[], float]] = {}
    for implementation in operation.implementations(jax.default_backend()):
        row = Row(
            operation=name,
            size=size,
            implementation=implementation,
            limit=machine.limit(case),
            bytes=case.bytes,
            flops=case.flops,
        )
        try:
            program, temporary = compiled(case, implementation, arguments, 0.9 * machine.memory)
            row = dataclasses.replace(row, temporary_bytes=temporary)
            ready[implementation] = timer(case, program, arguments)
        except DoesNotFit as reason:
            row = dataclasses.replace(row, note=str(reason))
        except Exception as refused:
            # A table says what went wrong in one place and goes on with the others.
            first = (str(refused).splitlines() or [""])[0]
            row = dataclasses.replace(row, note=f"{type(refused).__name__}: {first[:160]}")
        rows[implementation] = row
    for _ in range(samples):
        for implementation, sample in ready.items():
            rows[implementation].seconds.append(sample())
    return list(rows.values())


class DoesNotFit(Exception):
    """A program needs more memory than there is."""


def compiled(
    case: Case, implementation: str, arguments: tuple[Any, ...], memory: float
) -> tuple[Any, int]:
    """The program, and the bytes that it needs beside arguments and results."""

    def call(*arguments: Any) -> Any:
        return case.call(*arguments, implementation=implementation)

    program = jax.jit(call, donate_argnums=(0,) if case.replaces else ()).trace(*arguments)
    # Before the compiler, which may try out products of that size.
    if (array := largest(program.jaxpr.jaxpr)) > memory:
        raise DoesNotFit(f"has an array of {array / 1e9:.1f} GB: not run")
    compiled = program.lower().compile()
    used = compiled.memory_analysis()
    temporary = 0 if used is None else used.temp_size_in_bytes
    if (needed := temporary + 2 * nbytes(arguments)) > memory:
        raise DoesNotFit(f"needs {needed / 1e9:.1f} GB: not run")
    return compiled, temporary


def largest(jaxpr: Any) -> int:
    """Bytes of the largest array that a program names."""
    found = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            size = math.prod(getattr(variable.aval, "shape", ()))
            found = max(found, size * getattr(getattr(variable.aval, "dtype", None), "itemsize", 0))
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found = max(found, largest(inner))
    return found


def timer(case: Case, program: Any, arguments: tuple[Any, ...]) -> Callable[[], float]:
    """Takes a sample, in seconds per call; warmed up."""
    first = jax.tree.map(jnp.copy, arguments[0]) if case.replaces else arguments[0]
    state = [first]

    def run(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            result = program(state[0], *arguments[1:])
            if case.replaces:
                state[0] = result
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / calls

    run(1)
    calls = max(1, min(1000, int(SAMPLE_SECONDS / max(run(1), 1e-6))))
    return lambda: run(calls)


def page(rows: list[Row], machine: Machine) -> str:
    """The markdown table."""
    facts = circumstances(machine)
    changed = " with changes" if facts["changed"] else ""
    lines = [
        "# Kernels",
        "",
        "Made by `python -m benchmarks.kernels`, whose docstring says how.",
        "",
        f"{machine.device}, driver {facts['driver']}, jax {facts['jax']}, commit "
        f"{facts['commit']}{changed}. Limits: {machine.bandwidth / 1e9:.0f} GB/s and "
        f"{machine.flops / 1e12:.3g} TFLOP/s ({machine.source}). `of limit` is the limit's time "
        "over the median, `x reference` the reference's median over this one.",
        "",
        "| operation | size | implementation | median ms | IQR ms | n | GB/s | TFLOP/s | of limit "
        "| x reference | temporaries MiB | note |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    medians = {(r.operation, r.size, r.implementation): r.median for r in rows if r.seconds}
    for row in rows:
        cells = [row.operation, row.size, row.implementation]
        if row.seconds:
            reference = medians.get((row.operation, row.size, "reference"))
            cells += [
                f"{row.median * 1e3:.3f}",
                f"{row.spread * 1e3:.3f}",
                f"{len(row.seconds)}",
                f"{row.bytes / row.median / 1e9:.1f}",
                f"{row.flops / row.median / 1e12:.3g}",
                f"{row.limit / row.median:.1%}",
                "-" if reference is None else f"{reference / row.median:.2f}",
            ]
        else:
            cells += ["-"] * 7
        temporary = f"{row.temporary_bytes / 2**20:.1f}" if row.limit else "-"
        lines.append("| " + " | ".join([*cells, temporary, row.note.replace("|", "/")]) + " |")
    return "\n".join(lines) + "\n"


def in_numbers(row: Row) -> dict[str, Any]:
    timed = {"median": row.median, "iqr": row.spread, "n": len(row.seconds)} if row.seconds else {}
    return {**dataclasses.asdict(row), **timed}


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    main()
