"""`kvjax doctor`: whether a run would work here, checked before it starts."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from kvjax.cli import cluster

DESCRIPTION = """\
Check the machine, or every machine of a pod, before a long run: versions, devices, that processes
and devices reach each other, that they share a directory, and one step of a config. Prints one line
per check; exit status 1 where one fails."""
EXAMPLE = "kvjax doctor configs/retention_smollm2.yaml --output /shared/runs/retention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="of kvjax train: make one step of it too"
    )
    parser.add_argument(
        "--output", metavar="DIR", help="check that all processes can write and see this directory"
    )
    cluster.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs all checks; 1 where one failed.

    Raises:
      ValueError: processes that do not come together.
    """
    cluster.join(args)
    from kvjax import environment, processes

    def shown(line: str) -> None:
        if processes.is_first():
            print(line, flush=True)

    for name, value in {**environment.versions(), **environment.devices()}.items():
        shown(f"     {name:<18} {value}")
    failed = 0
    for name, check in _checks(args):
        try:
            shown(f"ok   {name:<18} {check()}")
        except Exception as error:  # whatever it is, it is what the check is there to find
            failed += 1
            first_line = str(error).partition("\n")[0]
            print(f"FAIL {name:<18} {type(error).__name__}: {first_line}", file=sys.stderr)
    return 1 if failed else 0


def _checks(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "same versions", _same_versions
    yield "collectives", _collectives
    if args.output is not None:
        yield "storage", lambda: _storage(Path(args.output))
    if args.config is not None:
        yield "one step", lambda: _one_step(args.config)


def _same_versions() -> str:
    """Every process has this one's packages and kind of device."""
    import jax

    from kvjax import environment, processes

    own = {**environment.versions(), "device": jax.local_devices()[0].device_kind}
    others = processes.union({jax.process_index(): json.dumps(own)})
    for number, text in others.items():
        theirs = json.loads(text)
        for name in own | theirs:
            if own.get(name) != theirs.get(name):
                raise RuntimeError(
                    f"process {number} has {name} {theirs.get(name)}, process "
                    f"{jax.process_index()} has {own.get(name)}"
                )
    return f"{len(others)} processes"


def _collectives() -> str:
    """A sum over all devices is right; and how long one takes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = np.asarray(jax.devices())
    mesh = Mesh(devices, ("all",))
    spread = NamedSharding(mesh, PartitionSpec("all"))
    size = devices.size
    ones = jax.make_array_from_callback(
        (size,), spread, lambda index: np.ones(size, np.float32)[index]
    )
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    if (found := float(total(ones))) != size:
        raise RuntimeError(f"the sum of {size} ones is {found}")
    start = time.perf_counter()
    for _ in range(10):
        total(ones).block_until_ready()
    return f"a sum over {size} devices takes {(time.perf_counter() - start) * 100:.2f} ms"


def _storage(output: Path) -> str:
    """Every process can write into the directory and sees what the others wrote."""
    import jax

    from kvjax import processes

    run = min(processes.union({jax.process_index(): uuid.uuid4().hex}).values())
    own = output / f".doctor-{run}-{jax.process_index()}"
    problem = ""
    try:
        output.mkdir(parents=True, exist_ok=True)
        own.write_text(run, encoding="utf-8")
    except OSError as error:
        problem = f"cannot write {own.parent}: {type(error).__name__}: {error.strerror}"
    # All processes go through both exchanges, whatever one of them found: none waits in vain.
    problems = processes.union({jax.process_index(): problem})
    if not any(problems.values()):
        missing = [
            str(number)
            for number in range(jax.process_count())
            if not (output / f".doctor-{run}-{number}").exists()
        ]
        if missing:
            problem = f"does not see what processes {', '.join(missing)} wrote to {output}"
        problems = processes.union({jax.process_index(): problem})
    if output.is_dir():
        own.unlink(missing_ok=True)
    if found := [f"process {number} {text}" for number, text in problems.items() if text]:
        raise RuntimeError(f"{'; '.join(found)}; needed is a directory that all processes share")
    return f"{output}: written and seen by {jax.process_count()} processes"


def _one_step(path: str) -> str:
    """One training step of the config, on its mesh; nothing of it is kept."""
    from kvjax.cli.train import prepared
    from train import config as config_module
    from train.loop import one_step

    config = config_module.load(path)
    recipe, model, shards = prepared(config)
    start = time.perf_counter()
    loss = one_step(config, recipe, model, shards)["loss"]
    if not math.isfinite(loss):
        raise RuntimeError(f"{path}: the loss is {loss}")
    return f"{path}: loss {loss:.4g} after {time.perf_counter() - start:.0f} s, with compilation"
