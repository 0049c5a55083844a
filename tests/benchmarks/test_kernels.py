"""The kernels' benchmark: what it declares, how it times, and what it writes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernels
from benchmarks.kernel_operations import OPERATIONS
from benchmarks.kernel_sizes import Case, Size

ROOT = Path(__file__).resolve().parents[2]
MACHINE = kernels.Machine(device="made up", bandwidth=1e9, flops=1e9, memory=1e9, source="here")


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_declaration_is_a_call_of_all_its_forms(name):
    """Of their types: what they compute is tested with each operation, and on the device."""
    operation = OPERATIONS[name]
    function = operation.load()
    if function is None:
        pytest.skip(f"{operation.function} is not in this version")
    case = operation.case(function, operation.small)
    arguments = jax.eval_shape(case.make, jax.random.key(0))
    operands = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments))
    assert 0.1 * operands < case.bytes < 10 * operands and case.flops >= 0
    first, *others = (
        jax.eval_shape(partial(case.call, implementation=form), *arguments)
        for form in operation.implementations("cpu")
    )
    assert all(other == first for other in others)


def test_implementations_are_those_that_a_function_allows():
    pooled = OPERATIONS["pooled_max"]
    assert pooled.implementations("cpu") == ("reference", "blockwise")
    assert pooled.implementations("gpu") == ("reference", "blockwise", "mosaic_gpu")
    assert OPERATIONS["select"].implementations("cpu")[:2] == ("reference", "threshold")


def test_sizes_in_use_and_to_check_can_be_declared():
    """Without making their arrays."""
    for operation in OPERATIONS.values():
        assert operation.checks
        function = operation.load()
        for shape in (*operation.sizes.values(), *operation.checks.values()):
            case = operation.case(function or (lambda *_: None), shape)
            jax.eval_shape(case.make, jax.random.key(0))


def test_pairs_are_those_a_causal_mask_leaves():
    size = Size(tokens=7, queries=3, heads=2, batch=2)
    seen = sum(key <= query for query in range(4, 7) for key in range(7))
    assert size.pairs == 4 * seen


def counting(calls):
    """A case whose forms are told apart by how often they are traced."""

    def call(x, *, implementation):
        if implementation == "blockwise":
            raise NotImplementedError("not for these | shapes")
        calls.append(implementation)
        return x + jnp.float32(1)

    return Case(
        make=lambda key: (jnp.zeros(2**10, jnp.float32),), call=call, bytes=2**13, flops=2**10
    )


def measured(monkeypatch, machine=MACHINE, **changes):
    calls = []
    operation = dataclasses.replace(
        OPERATIONS["occupancy"],
        case=lambda function, shape: dataclasses.replace(counting(calls), **changes),
    )
    forms = lambda self, platform: ("reference", "blockwise", "other")  # noqa: E731
    monkeypatch.setattr(kernels.Operation, "implementations", forms)
    return kernels.measure("made_up", operation, "tiny", None, machine, 4), calls


@pytest.mark.parametrize("replaces", [False, True])
def test_forms_are_timed_in_turn_and_what_is_refused_is_told(monkeypatch, replaces):
    monkeypatch.setattr(kernels, "SAMPLE_SECONDS", 1e-4)
    rows, calls = measured(monkeypatch, replaces=replaces)
    reference, refused, other = rows
    assert calls == ["reference", "other"]  # traced once each
    assert len(reference.seconds) == len(other.seconds) == 4
    assert min(reference.seconds) > 0 and reference.spread >= 0
    assert reference.limit == pytest.approx(2**13 / 1e9)
    assert refused.seconds == [] and refused.note == ("NotImplementedError: not for these | shapes")
    text = kernels.page(rows, MACHINE)
    lines = [line for line in text.splitlines() if "made_up" in line]
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
    assert "not for these / shapes" in lines[1] and "1.00" in lines[0]


def test_what_does_not_fit_is_not_run(monkeypatch):
    for memory, why in ((2**11, "has an array of"), (2**13, "needs")):
        rows, _ = measured(monkeypatch, dataclasses.replace(MACHINE, memory=memory))
        assert rows[0].seconds == [] and rows[0].note.startswith(why)
        assert rows[0].note.endswith("not run")


def test_every_operation_has_its_first_size_before_any_second_one():
    order = [name for name, *_ in kernels.in_turn(list(OPERATIONS), small=False)]
    timed = [name for name, operation in OPERATIONS.items() if operation.sizes]
    assert order[: len(timed)] == timed
    assert len(order) == sum(len(operation.sizes) for operation in OPERATIONS.values())


def test_time_that_has_passed_leaves_sizes_out_and_says_so(tmp_path, monkeypatch, capsys):
    flags = ["--small", "--operation", "select", "--seconds", "0", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kernels", *flags])
    kernels.main()
    assert "left out: 0 s had passed" in capsys.readouterr().out


def test_a_small_run_writes_a_table_and_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "SAMPLE_SECONDS", 1e-4)
    flags = ["--small", "--operation", "select", "--samples", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kernels", *flags])
    kernels.main()
    report = json.loads((tmp_path / "kernels.json").read_text())
    facts = report["circumstances"]
    assert {"device", "driver", "jax", "commit", "bandwidth", "flops"} <= set(facts)
    assert facts["bandwidth"] > 1e8 and facts["flops"] > 1e8
    assert {row["n"] for row in report["rows"]} == {2}
    table = (tmp_path / "kernels.md").read_text()
    assert table in capsys.readouterr().out and "| select | small | threshold |" in table


def test_the_device_check_says_that_there_is_no_gpu(tmp_path):
    ran = subprocess.run(
        ["bash", "benchmarks/device_check.sh"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "JAX finds no GPU here" in ran.stderr
