"""Launch recipes run the commands that there are, with the options that they have."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kvjax.cli.main import COMMANDS

LAUNCH = Path(__file__).parents[2] / "launch"


def recorder(path: Path, log: Path) -> str:
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {log}\n')
    path.chmod(0o755)
    return str(path)


def test_a_tpu_slice_gets_the_config_and_runs_doctor_and_train_on_every_worker(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("model: x\n")
    log = tmp_path / "log"
    environment = os.environ | {"GCLOUD": recorder(tmp_path / "gcloud", log)}
    command = [str(LAUNCH / "tpu_vm.sh"), "slice", "us-east1-d", str(config), "/mnt/runs"]
    subprocess.run(command, env=environment, check=True)
    shown = log.read_text()
    assert shown.count("--worker=all") == 2 and shown.count("--zone us-east1-d") == 2
    assert f"scp {config} slice:kvjax-run.yaml" in shown
    assert "kvjax doctor kvjax-run.yaml --output '/mnt/runs'" in shown
    assert "kvjax train kvjax-run.yaml --output '/mnt/runs'" in shown


def test_slurm_starts_one_process_per_gpu(tmp_path):
    log = tmp_path / "log"
    recorder(tmp_path / "srun", log)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": "/home/me",
    }
    command = [str(LAUNCH / "slurm.sh"), "run.yaml", "/shared/run"]
    subprocess.run(command, env=environment, check=True)
    kvjax = "/home/me/.venv/bin/kvjax"
    assert log.read_text().splitlines() == [
        f"{kvjax} doctor run.yaml --output /shared/run",
        f"{kvjax} train run.yaml --output /shared/run",
    ]


@pytest.mark.parametrize("script", ["tpu_vm.sh", "slurm.sh"])
def test_wrong_arguments_are_refused_in_one_line(script):
    done = subprocess.run([str(LAUNCH / script), "x"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "needed are" in done.stderr


def test_the_jobset_asks_for_the_chips_of_its_topology():
    (jobset,) = yaml.safe_load_all((LAUNCH / "gke_jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"] == rows * columns // chips
    assert container["command"][0] == "kvjax"


def test_every_command_that_is_launched_exists():
    for path in LAUNCH.iterdir():
        for command in re.findall(r'kvjax"? (doctor|train|eval)\b', path.read_text()):
            assert command in COMMANDS
