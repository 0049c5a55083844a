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
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--process"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    both = [
        subprocess.Popen(
            [*command, f"{i}/2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors[-2000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    journals = sorted(p.name for p in (tmp_path / "run").glob("*.jsonl"))
    assert len(journals) == 2
    assert len({sample["id"] for part in results["parts"] for sample in part["samples"]}) == 3
