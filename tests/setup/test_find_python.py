"""The search for an interpreter: candidates are run, not believed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def stub(folder: Path, name: str, answer: str) -> Path:
    """A `python` that answers the search's question with a fixed line, or fails without one."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{f'echo {answer!r}' if answer else 'exit 127'}\n")
    path.chmod(0o755)
    return path


def find(home: Path, path: Path | None = None, python: str | None = None):
    environment = {
        "PATH": f"{path}:/usr/bin:/bin" if path else os.environ["PATH"],
        "HOME": str(home),
    }
    if python is not None:
        environment["PYTHON"] = python
    return subprocess.run(
        ["sh", str(ROOT / "scripts" / "find_python.sh")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_shim_that_fails_is_passed_over(tmp_path):
    stub(tmp_path, "python3.12", "")
    stub(tmp_path, "python3.13", "ok 3.13 /some where/python")
    assert find(tmp_path, tmp_path).stdout == "/some where/python\n"


def test_a_tested_version_is_preferred_to_a_newer_one(tmp_path):
    for name in ("python3.12", "python3.14", "python3"):
        stub(tmp_path, name, "ok 3.15 /new/python")
    stub(tmp_path, "python3.13", "ok 3.13 /tested/python")
    assert find(tmp_path, tmp_path).stdout == "/tested/python\n"


def test_pyenv_versions_are_found_behind_an_old_default(tmp_path):
    for name in ("python3.12", "python3.13", "python3.14", "python3", "python"):
        stub(tmp_path, name, "version 3.11.7")
    folder = tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin"
    folder.mkdir(parents=True)
    stub(folder, "python", "ok 3.12 /pyenv/python")
    assert find(tmp_path, tmp_path).stdout == "/pyenv/python\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("version 3.11.7", "is 3.11.7"),
        ("venv 3.12 ensurepip", "lacks its venv module"),
        ("", "does not run"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path, answer, reason):
    found = find(tmp_path, python=str(stub(tmp_path, "python", answer)))
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert "Python >= 3.12" in found.stderr
    assert reason in found.stderr


def test_a_real_interpreter_is_accepted(tmp_path):
    found = find(tmp_path, python=sys.executable)
    assert (found.returncode, found.stderr) == (0, "")
    assert Path(found.stdout.strip()).exists()
