"""How a command joins the other processes of its run: found out from the cluster, or told."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A process that has not been heard of for so long is taken for dead, which ends the others.
HEARTBEAT_SECONDS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of commands that may run as several processes."""
    group = parser.add_argument_group(
        "several processes",
        "On Cloud TPU, GKE, SLURM and Open MPI the processes find each other. Elsewhere start the "
        "same command once per process with both options.",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where the processes meet: a port of process 0"
    )
    group.add_argument("--process", metavar="I/N", help="this is process I (0-based) of N")


def join(args: argparse.Namespace) -> None:
    """Joins the run's processes, before anything else uses JAX; does nothing where it is alone.

    Raises:
      ValueError: options that do not fit, or processes that do not come.
    """
    given = (args.coordinator, args.process)
    if given == (None, None):
        if detected(os.environ):
            _initialize()
        return
    if None in given:
        raise ValueError("--coordinator and --process belong together: give both, or neither")
    if re.fullmatch(r".+:\d+", args.coordinator) is None:
        raise ValueError(f"--coordinator={args.coordinator!r}: allowed: HOST:PORT")
    match = re.fullmatch(r"(\d+)/(\d+)", args.process)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"--process={args.process!r}: allowed: I/N with 0 <= I < N, such as 0/4")
    _initialize(
        coordinator_address=args.coordinator,
        num_processes=int(match[2]),
        process_id=int(match[1]),
    )


def detected(environment: Mapping[str, str]) -> str | None:
    """The cluster that started this process beside others, as far as its environment says.

    Names what JAX can set itself up from: SLURM and Open MPI with several tasks, TPU workers of
    GKE, and the TPU runtime of a Cloud TPU machine, which knows its slice.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return "SLURM"
    if int(environment.get("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return "Open MPI"
    if environment.get("JAX_PLATFORMS", "tpu").startswith("tpu"):
        if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
            return "GKE"
        chips = (Path("/dev/accel0"), Path("/dev/vfio/0"))
        if importlib.util.find_spec("libtpu") and any(chip.exists() for chip in chips):
            return "Cloud TPU"
    return None


def _initialize(**where: Any) -> None:
    import jax

    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"the run's processes did not come together: {error}; see --coordinator and --process"
        ) from error
