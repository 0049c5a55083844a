"""What the distribution declares, and what the pinned environment holds."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_constraints_are_pins_and_nothing_else():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line


def test_pins_satisfy_what_the_project_requires():
    extras = PROJECT["optional-dependencies"]
    tested = [Requirement(line) for name in ("test", "plot", "hub") for line in extras[name]]
    for requirement in RUNTIME + tested:
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_every_requirement_is_bounded_on_both_sides():
    for requirement in RUNTIME:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, requirement


def test_pytorch_is_no_part_of_it():
    assert "torch" not in pins()
    assert all(requirement.name != "torch" for requirement in RUNTIME)


def test_all_extras_exist():
    assert {"test", "hub", "plot", "gpu", "tpu", "bench"} <= set(PROJECT["optional-dependencies"])


def test_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


@pytest.mark.parametrize("words", ["ruff check", "ruff format --check", "-m mypy", "-m pytest"])
def test_make_test_checks_everything(words):
    planned = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert words in planned.stdout
