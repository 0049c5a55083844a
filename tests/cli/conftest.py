"""Running the command inside the test's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvjax.cli.main import main


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    status: int
    out: str
    err: str


type Run = Callable[..., Finished]


@pytest.fixture
def run(capsys) -> Run:
    """`run("generate", "--prompt", ...)` gives exit status, standard output and error."""

    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as left:  # --help and --version
            status = int(left.code or 0)
        captured = capsys.readouterr()
        return Finished(status=status, out=captured.out, err=captured.err)

    return call
