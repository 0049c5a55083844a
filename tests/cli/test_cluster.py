"""How a command is told of its other processes."""

from __future__ import annotations

import pytest

from kvjax.cli.main import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--coordinator", "a:1"], "--coordinator and --process belong together"),
        (["--coordinator", "a", "--process", "0/2"], "--coordinator='a': allowed: HOST:PORT"),
        (["--coordinator", "a:1", "--process", "2/2"], "--process='2/2': allowed: I/N with"),
    ],
)
def test_wrong_options_are_refused_in_one_line(capsys, options, message):
    assert main(["train", "configs/retention_smollm2.yaml", *options]) == 2
    assert message in capsys.readouterr().err
