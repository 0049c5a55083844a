"""Launch recipes run the commands that there are, with the options and files that they have."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from kvjax.cli import main
from train import config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"


def recorder(path: Path, log: Path, then: str = "") -> str:
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {log}\n{then}\n')
    path.chmod(0o755)
    return str(path)


def parsed(command: str) -> object:
    """The arguments of a launched `kvjax ...`, as its own parser takes them."""
    arguments = shlex.split(command)
    return main._parser(arguments).parse_args(arguments)


def launched(text: str) -> list[str]:
    """Every `kvjax ...` that a text starts, without the program."""
    found = re.findall(r"kvjax ((?!-)[a-z]+ [^\n&]+?)(?: &&)?$", text, re.MULTILINE)
    return [command.strip().rstrip('"') for command in found]


@pytest.fixture
def slice_of(tmp_path):
    """Runs tpu_vm.sh with programs that only take note; gives what they were called with."""

    def run(**environment):
        config = tmp_path / "run.yaml"
        config.write_text("model: x\n")
        log = tmp_path / "log"
        wheel = (
            'for d in "$@"; do [ -d "$d" ] && touch "$d/kvjax-0-py3-none-any.whl" && break; done'
        )
        given = {
            "GCLOUD": recorder(tmp_path / "gcloud", log),
            "PYTHON": recorder(tmp_path / "python", log, wheel),
            **environment,
        }
        command = [str(LAUNCH / "tpu_vm.sh"), "slice", "us-east1-d", str(config), "/mnt/runs"]
        subprocess.run(command, env=os.environ | given, check=True)
        return log.read_text()

    return run


def test_a_tpu_slice_gets_a_wheel_and_the_config_and_runs_doctor_and_train(slice_of):
    shown = slice_of()
    assert "-m pip wheel" in shown and "--no-deps" in shown
    assert shown.count("--worker=all") == 3 and shown.count("--zone us-east1-d") == 3
    assert re.search(r"scp \S+\.whl slice:kvjax-0-py3-none-any\.whl", shown)
    assert re.search(r"scp \S+run\.yaml slice:kvjax-run\.yaml", shown)
    assert "venv --clear" in shown, "a wheel of the same version would not be installed again"
    assert "pip install -q './kvjax-0-py3-none-any.whl[tpu,train,hub]'" in shown
    doctor, train = map(parsed, launched(shown))
    assert (doctor.command, train.command) == ("doctor", "train")
    for arguments in (doctor, train):
        assert (arguments.config, arguments.output) == ("kvjax-run.yaml", "/mnt/runs")


def test_a_tpu_slice_may_install_something_else(slice_of):
    shown = slice_of(KVJAX_REQUIREMENT="kvjax[tpu] @ git+https://host/kvjax")
    assert "pip install -q 'kvjax[tpu] @ git+https://host/kvjax'" in shown
    assert "pip wheel" not in shown and shown.count("--worker=all") == 2


def test_slurm_starts_one_process_per_gpu_which_sees_all_of_its_node(tmp_path):
    log = tmp_path / "log"
    recorder(tmp_path / "srun", log)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": "/home/me",
    }
    script = LAUNCH / "slurm.sh"
    subprocess.run([str(script), "run.yaml", "/shared/run"], env=environment, check=True)
    lines = log.read_text().splitlines()
    assert all(line.startswith("/home/me/.venv/bin/kvjax ") for line in lines)
    doctor, train = (parsed(line.partition(" ")[2]) for line in lines)
    assert (doctor.command, train.command) == ("doctor", "train")
    assert train.config == doctor.config == "run.yaml" and train.output == "/shared/run"
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    # JAX takes the GPU of SLURM_LOCALID, so no process may be shown one alone.
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "gpus-per-task" not in asked


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
    doctor, train = map(parsed, launched(container["args"][0]))
    assert (doctor.command, train.command) == ("doctor", "train")
    assert train.config == doctor.config == "/config/run.yaml" and train.output == "/runs/train"


def test_configs_that_recipes_name_fit_a_slice_of_16_chips_and_need_no_file():
    named = set()
    for path in LAUNCH.iterdir():
        named |= set(re.findall(r"configs/\w+\.yaml", path.read_text()))
    assert named
    for name in named:
        found = config.load(ROOT / name)
        assert found.mesh == {"fsdp": 16} and found.batch % 16 == 0
        content = (ROOT / name).read_text()
        assert "start:" not in content and "- text:" not in content
        assert "/" in found.model, "a model of the hub, which every worker can load"
