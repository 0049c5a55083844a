"""`kvjax eval`: bad input ends in one line, status 2, and leaves nothing behind."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kvjax.cli.main import main
from tests.eval import handmade

DEMO = "configs/demo.yaml"


def demo(tmp_path, **changes):
    content = yaml.safe_load(Path(DEMO).read_text(encoding="utf-8")) | changes
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["--samples", "0"], "--samples=0"),
        ({}, ["--haystack", "/no/such/book.txt"], "/no/such/book.txt"),
        ({}, ["--resume"], "--resume"),
        ({}, ["--resume", "--overwrite"], "not allowed with"),
        ({"policies": ["snapvk"]}, [], "unknown policy 'snapvk'"),
        ({"policies": [{"snapkv": {"size": 3}}]}, [], "policy 'snapkv' has no option 'size'"),
        ({"policies": [{"snapkv": {"chunk": 0}}]}, [], "policies[0]: chunk=0"),
        ({"policies": [{"kvzip": {"prefill": "chunked"}}]}, [], "policies[0]: kvzip replays"),
        ({}, ["--lengths", "1k"], "--lengths='1k'"),
        ({}, ["--shard", "4/4"], "--shard='4/4': allowed: I/N with 0 <= I < N"),
        ({}, ["--shard", "1/4", "--overwrite"], "--overwrite with --shard 1/4"),
        ({}, ["--batch", "0"], "--batch=0"),
        ({}, ["--max-new-tokens", "0"], "--max-new-tokens=0"),
        ({"model": "no-such-model"}, [], "no-such-model"),
        ({"budgets": [0]}, [], "budgets[0]=0"),
        ({"colour": "red"}, [], "unknown key 'colour'"),
    ],
)
def test_bad_input(tmp_path, capsys, changes, arguments, message):
    output = tmp_path / "out"
    path = demo(tmp_path, **changes)
    assert main(["eval", "--config", path, "--output", str(output), *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert not output.exists()


def test_a_policy_option_without_a_name_is_one_line(tmp_path, capsys):
    path = demo(tmp_path, policies=[{"snapkv": {1: 2, "a": 3}}])
    assert main(["eval", "--config", path, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "policies[0].snapkv=1: allowed: options by name" in error and error.count("\n") == 1


def test_a_missing_package_is_one_line(tmp_path, capsys, monkeypatch):
    parquet = tmp_path / "qasper.parquet"
    parquet.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    task = {"name": "longbench", "subset": "qasper", "path": str(parquet)}
    assert main(["eval", "--config", demo(tmp_path, tasks=[task]), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "reading parquet needs pyarrow: pip install 'kvjax[eval]'" in error
    assert error.count("\n") == 1


def test_overwrite_is_refused_to_processes_that_share_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvjax.cli.eval._shard", lambda given: (1, 4))
    assert main(["eval", "--config", demo(tmp_path), "--overwrite"]) == 2
    assert "--overwrite with 4 processes: it would drop" in capsys.readouterr().err


def test_a_dry_run_that_overwrites_does_not_mind_what_is_there(tmp_path, capsys):
    output = tmp_path / "out"
    output.mkdir()
    (output / "samples.jsonl").write_text('{"format": 2, "config_hash": "other"}\n')
    path = demo(tmp_path, model="no-such-model", output=str(output))
    assert main(["eval", "--config", path, "--dry-run"]) == 2
    assert "give --overwrite" in capsys.readouterr().err
    assert main(["eval", "--config", path, "--dry-run", "--overwrite"]) == 0


@pytest.mark.parametrize(("samples", "status"), [(0, 0), (1, 1)])
def test_only_a_part_whose_answers_all_failed_ends_badly(tmp_path, monkeypatch, samples, status):
    """A part of the run may have no context at all."""
    failed = handmade.record("full", error="out of memory")
    results = handmade.results([handmade.sample("needle", 0, [failed])] * samples)
    loaded = SimpleNamespace(tokenizer="there")
    monkeypatch.setattr("kvjax.load", lambda model: loaded)
    monkeypatch.setattr("eval.engine.KvjaxEngine", lambda *given: None)
    monkeypatch.setattr("eval.harness.run", lambda *given, **options: results)
    path = demo(tmp_path, output=str(tmp_path / "out"))
    assert main(["eval", "--config", path, "--shard", "7/8"]) == status


def test_without_a_config_it_says_what_is_missing(capsys):
    assert main(["eval"]) == 2
    assert "--config" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    arguments = ["eval", "--config", DEMO, "--output", str(tmp_path / "taken" / "run")]
    assert main(arguments) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


def test_dry_run_counts_without_the_model(tmp_path, capsys):
    path = demo(tmp_path, model="no-such-model", output=str(tmp_path / "out"))
    assert main(["eval", "--config", path, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "prefills   40" in shown and f"answers    {40 * (1 + 7 * 3)}" in shown
    assert "needle: noise, prose; lengths 500, 900; depths 0, 0.25" in shown
    assert "time       unknown (model 'no-such-model'" in shown
    assert not (tmp_path / "out").exists()


def test_dry_run_estimates_the_time_on_this_machine(capsys, default_model):
    del default_model  # that it is there
    assert main(["eval", "--config", DEMO, "--dry-run", "--samples", "1"]) == 0
    assert re.search(r"time       at most about \d+ ", capsys.readouterr().out)


def test_list_names_tasks_haystacks_and_policies(capsys):
    assert main(["eval", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(
        name in shown for name in ("needle", "niah_single_1", "noise", "prose", "full", "snapkv")
    )
