"""A run that is killed twice ends as one that is left alone, and what differs would be told."""

from __future__ import annotations

import argparse
import json

import pytest

from benchmarks import soak
from train.metrics import METRICS_FILE

STEPS = 60


@pytest.mark.slow
def test_a_killed_run_equals_an_unbroken_one_and_differences_are_found(tmp_path):
    asked = argparse.Namespace(minutes=None, steps=STEPS, kills=2, save_seconds=1.0, seed=1)
    found = soak.soak(tmp_path, asked)
    assert found["equal"], found
    in_step, in_save = found["kills"]
    assert 0 < in_step["step"] <= in_save["step"] <= STEPS
    for kill in found["kills"]:
        assert 0 <= kill["resumed"] <= kill["step"]
        assert kill["repeated"] == kill["step"] - kill["resumed"]
    # What a kill cut short is not left lying about.
    assert all(path.name.isdecimal() for path in (tmp_path / "killed" / "checkpoints").iterdir())

    metrics = tmp_path / "killed" / METRICS_FILE
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[4]["loss"] += 0.5
    broken = [*lines[:7], lines[6], *lines[8:]]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in broken))
    differ = soak.differences(tmp_path / "unbroken", tmp_path / "killed", STEPS)
    assert differ["missing_steps"] == [8] and differ["doubled_steps"] == [7]
    assert differ["metrics"] == {"loss": 0.5} and differ["parameters"] == 0


def test_a_page_tells_every_kill_and_what_is_not_equal():
    kill = {"step": 40, "resumed": 31, "repeated": 9, "cut_a_save": True, "seconds_back": None}
    report = {
        "command": "made up",
        "commit": "abc",
        "versions": {"jax": "1", "orbax-checkpoint": "2"},
        "machine": "one",
        "steps": 99,
        "save_seconds": 20.0,
        "seconds": {"unbroken": 1.0, "killed": 2.0},
        "kills": [kill, kill | {"seconds_back": 3.25}],
        "differences": {
            "missing_steps": [],
            "doubled_steps": [],
            "metrics": {"loss": 0.25},
            "parameters": 0.125,
            "optimizer": 0.0,
            "place_in_the_data": False,
        },
        "equal": False,
    }
    text = soak.page(report)
    assert "**Not equal**: last parameters differ by 0.125" in text and "loss of the values" in text
    assert "| 1 | 40 | yes | 31 | 9 | killed before |" in text and "| 9 | 3.2 |" in text
