"""Processes that joined share the samples of a run, and the first one reports all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.train.test_processes import free_port


@pytest.mark.model
@pytest.mark.slow
def test_two_processes_share_a_run(tmp_path, default_model):
    del default_model  # that it is there
    config = {
        "model": "smollm2-135m-instruct",
        "tasks": [
            {
                "name": "needle",
                "haystacks": ["noise"],
                "lengths": [150],
                "depths": [0.5],
                "samples": 3,
            }
        ],
        "policies": ["full", "streaming"],
        "budgets": [0.5],
        "max_new_tokens": 3,
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "kvjax.cli.main", "eval", "--config", str(path)]
    joined = [*command, "--coordinator", f"127.0.0.1:{free_port()}", "--process"]
    alone = [*command, "--output", str(tmp_path / "alone")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for line in ([*joined, "0/2"], [*joined, "1/2"])
    ]
    for process in both:
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors[-2000:]
    subprocess.run(alone, env=environment, check=True, capture_output=True, timeout=900)
    assert len(sorted((tmp_path / "run").glob("*.jsonl"))) == 2
    found, wanted = (answers(tmp_path / name / "results.json") for name in ("run", "alone"))
    assert len(found) == 3 and found == wanted


def answers(path):
    """What was answered, and how it scores, by sample."""
    parts = json.loads(path.read_text())["parts"]
    samples = [sample for part in parts for sample in part["samples"]]
    return {
        sample["id"]: [
            (one["policy"], one["budget"], one["answer"], one["score"]) for one in sample["records"]
        ]
        for sample in samples
    }
