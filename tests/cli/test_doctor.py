"""`kvjax doctor` says what works, and fails where something does not."""

from __future__ import annotations

import pytest

from kvjax import environment
from kvjax.cli import doctor
from kvjax.cli.main import main


def test_a_machine_in_order_passes_every_check(tmp_path, capsys):
    assert main(["doctor", "--output", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr()
    checks = [line.split()[1:3] for line in shown.out.splitlines() if line.startswith("ok")]
    assert checks[:2] == [["same", "versions"], ["collectives", "a"]]
    assert "written and seen by 1 processes" in shown.out and shown.err == ""
    assert list((tmp_path / "runs").iterdir()) == []  # it cleans up


def test_what_fails_is_named_and_the_other_checks_go_on(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["doctor", "no-such.yaml", "--output", str(tmp_path / "file")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("FAIL storage") and "FileExistsError" in errors[0]
    assert errors[1].startswith("FAIL one step") and "no-such.yaml" in errors[1]


def test_processes_of_other_versions_are_told_apart(monkeypatch):
    from kvjax import processes

    own = environment.versions()
    other = '{"python": "3.99"}'
    monkeypatch.setattr(processes, "union", lambda texts: {**texts, 1: other})
    with pytest.raises(RuntimeError, match=f"process 1 has python 3.99.* has {own['python']}"):
        doctor._same_versions()
