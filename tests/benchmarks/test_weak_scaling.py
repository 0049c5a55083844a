"""Programs of one device keep their size as devices grow, and one that does not is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import weak_scaling

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_small_programs_do_not_grow_and_exchange_weights_and_not_rows(tmp_path):
    flags = ["--small", "--devices", "8,16", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.weak_scaling", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = json.loads((tmp_path / "weak_scaling.json").read_text())
    assert (tmp_path / "weak_scaling.md").read_text() in done.stdout and report["growth"] == []
    rows = {(row["program"], row["devices"]): row for row in report["rows"]}
    assert rows["decode", 16]["mesh"] == {"data": 4, "tensor": 4}
    # An entry that is appended is written where its head lies.
    assert rows["decode", 8]["collective_bytes"] == rows["decode", 16]["collective_bytes"]
    # With a model over all devices they sum gradients alone, as with a whole model on each.
    whole, cut = (rows[name, 8]["collective_bytes"] for name in ("train-data", "train-fsdp"))
    assert cut["all-reduce"] < 1.1 * whole["all-reduce"]
    assert "all-gather" not in whole and cut["all-gather"] > 0


def made_up(devices, **changes):
    return {
        "program": "decode",
        "devices": devices,
        "mesh": {"data": devices},
        **dict.fromkeys(weak_scaling.JUDGED, 2**20),
        "collectives": {"all-reduce": 3},
        "collective_bytes": {"all-reduce": 2**20},
        "unknown_loops": 0,
        **changes,
    }


def test_what_grows_beyond_five_percent_is_told():
    rows = [made_up(8), made_up(64, peak_bytes=1.04 * 2**20), made_up(256, flops=1.06 * 2**20)]
    (grown,) = weak_scaling.growth(rows)
    assert grown == "decode: flops of 256 devices is 1.060 times that of 8"
    report = dict.fromkeys(("command", "commit", "jax", "machine", "about"), "made up")
    text = weak_scaling.page(report | {"rows": rows, "growth": [grown]})
    assert f"**Grows beyond 5 %:**\n\n* {grown}" in text and "1.0 MiB (1.040)" in text
    assert "| 3 all-reduce (1.00) | 1.00 MiB (1.000) |" in text


def test_other_programs_are_refused(monkeypatch, capsys):
    for flags, message in (
        (["--programs", "poem"], "--programs='poem'"),
        (["--devices", "12"], "--devices=12"),
    ):
        monkeypatch.setattr(sys, "argv", ["weak_scaling", *flags])
        with pytest.raises(SystemExit):
            weak_scaling.main()
        assert message in capsys.readouterr().err
