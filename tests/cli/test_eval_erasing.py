"""`kvjax eval` with a config of erasing, on a model in a directory."""

from __future__ import annotations

import pytest

from kvjax.cli.main import main


@pytest.fixture
def path(tmp_path):
    def write(**changes):
        lines = {
            "model": "nowhere",
            "suites": "[chain, unrelated]",
            "haystacks": "[sentences]",
            "lengths": "[300]",
            "samples": 3,
            "methods": "[mask, {local-repair: {tokens: 8}}]",
            "output": str(tmp_path / "run"),
            **changes,
        }
        file = tmp_path / "erasing.yaml"
        file.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        return str(file)

    return write


def test_a_dry_run_says_what_would_run(path, capsys, tmp_path):
    assert main(["eval", "--config", path(spans="[1, 2]"), "--dry-run", "--samples", "5"]) == 0
    wanted = "15 samples in 3 cells under none, recompute, mask, local-repair(tokens=8)\n"
    assert capsys.readouterr().out == wanted
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "0/2"], "--shard: not taken with a config of erasing"),
        (["--lengths", "300"], "--lengths: not taken"),
        (["--samples", "0"], "--samples=0: allowed"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0: allowed"),
        (["--resume"], "holds no run"),
    ],
)
def test_what_does_not_fit_is_one_line(path, capsys, options, message):
    assert main(["eval", "--config", path(), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_list_names_suites_and_methods(capsys):
    assert main(["eval", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "suites of erasing\n  needle-conflict, neighbour" in shown
    assert "methods of erasing\n  kveraser, hybrid" in shown
