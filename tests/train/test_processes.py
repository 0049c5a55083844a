"""Several processes train one run as one does: same losses, their own data, one loss of a peer."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvjax.cli.cluster import detected
from tests.train import tiny_run

STEPS = 5


def program(port: int, process: int, count: int, output: Path, mesh: dict, delay: float = 0.0):
    arguments = [port, process, count, 8 // count, output, STEPS, json.dumps(mesh), delay]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.two_processes", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    process = program(0, 0, 1, output, {"data": 8})
    shown, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-2000:]
    assert json.loads(shown.splitlines()[-1]) == {"shards": [0, 1]}
    return tiny_run.losses(str(output))


def test_two_processes_lose_one_and_go_on_as_one_process_over_another_mesh(tmp_path, alone):
    port, mesh = free_port(), {"data": 4, "fsdp": 2}
    first, second = (program(port, i, 2, tmp_path, mesh, delay=1.0) for i in range(2))
    deadline = time.monotonic() + 300
    while not (tmp_path / "checkpoints" / "2").exists():
        assert first.poll() is None and second.poll() is None, first.communicate()[1][-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second.send_signal(signal.SIGKILL)
    second.wait()
    killed = time.monotonic()
    _, errors = first.communicate(timeout=120)
    assert first.returncode != 0 and time.monotonic() - killed < 60
    assert "another task died" in errors or "lost the others" in errors

    again = program(0, 0, 1, tmp_path, {"data": 2, "tensor": 2, "sequence": 2})
    _, errors = again.communicate(timeout=600)
    assert again.returncode == 0, errors[-2000:]
    found = tiny_run.losses(str(tmp_path))
    assert list(found) == list(alone)
    np.testing.assert_allclose(list(found.values()), list(alone.values()), rtol=1e-5)


def test_two_processes_read_a_shard_each_and_have_the_losses_of_one(tmp_path, alone):
    port = free_port()
    both = [program(port, i, 2, tmp_path, {"data": 8}) for i in range(2)]
    for shard, process in enumerate(both):
        shown, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-2000:]
        assert json.loads(shown.splitlines()[-1]) == {"shards": [shard]}
    found = tiny_run.losses(str(tmp_path))
    np.testing.assert_allclose(list(found.values()), list(alone.values()), rtol=1e-5)


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "GKE"),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
    ],
)
def test_a_cluster_is_known_by_its_environment(environment, cluster):
    assert detected(environment) == cluster
