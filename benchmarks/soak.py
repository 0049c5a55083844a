"""A training run that is killed again and again ends as one that is left alone.

    python -m benchmarks.soak [--minutes 10] [--kills 10] [--seed 0] [--out docs/results]

`kvjax train` on a small random model, saved every 20 seconds, once unbroken and once killed
(SIGKILL) at steps drawn from the seed and started again: every second kill while a checkpoint is
being written, the others anywhere in a step. The last checkpoints (parameters, optimizer, place in
the data) and every step's metrics have to be equal to the bit, no step missing or twice there; the
command ends with status 1 where they are not. Writes soak.json and soak.md.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.soak_run import Life, prepare
from benchmarks.vs_kvpress import commit, machine
from kvjax.environment import versions
from train.metrics import METRICS_FILE, read_lines

PACE_STEPS = 60  # of the run that says how many steps take the time asked for


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both runs, and what they differ in."""
    config = prepare(folder, args.save_seconds)
    steps = args.steps
    if steps is None:
        Life(config, folder / "pace", PACE_STEPS).finish()
        steps = max(args.kills + 1, round(60 * args.minutes / pace(folder / "pace")))
    start = time.monotonic()
    Life(config, folder / "unbroken", steps).finish()
    unbroken = time.monotonic() - start
    rng = np.random.default_rng(args.seed)
    start = time.monotonic()
    kills = killed_run(config, folder / "killed", steps, args.kills, rng)
    killed = time.monotonic() - start
    found = differences(folder / "unbroken", folder / "killed", steps)
    return {
        "steps": steps,
        "save_seconds": args.save_seconds,
        "seconds": {"unbroken": unbroken, "killed": killed},
        "kills": kills,
        "differences": found,
        "equal": len(kills) == args.kills and not any(found.values()),
    }


def pace(output: Path) -> float:
    """Seconds of a step, compilation left out."""
    facts = json.loads((output / "config.json").read_text(encoding="utf-8"))["config"]
    last = read_lines(output / METRICS_FILE)[-1]
    return facts["batch"] * facts["length"] / last["tokens_per_second"]


def killed_run(
    config: Path, output: Path, steps: int, count: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """A run to its end with `count` kills on the way, one in each of as many equal parts of it."""
    parts = np.arange(count) + rng.uniform(size=count)
    targets = np.maximum(1, (parts * (steps - 1) / count).astype(int))
    kills: list[dict[str, Any]] = []
    life = Life(config, output, steps)

    def come_back(life: Life) -> None:
        if kills:
            resumed = life.resumed
            kills[-1] |= {
                "resumed": resumed,
                "repeated": kills[-1]["step"] - resumed,
                "seconds_back": life.back,
            }

    for number, target in enumerate(targets):
        in_save = number % 2 == 1
        there = life.wait(lambda life=life, target=target: (life.step or 0) >= target)
        if there and in_save:
            there = life.wait(lambda life=life: life.unfinished)
        if not there:  # at its end before it could be killed
            break
        # Saves of this size take a few hundredths of a second, steps about as long.
        time.sleep(rng.uniform(0, 0.05))
        life.kill()
        come_back(life)
        kills.append({"step": life.step, "meant": "save" if in_save else "step"})
        kills[-1]["cut_a_save"] = life.unfinished
        life = Life(config, output, steps, before=kills[-1]["step"])
    life.finish()
    come_back(life)
    return kills


def differences(unbroken: Path, killed: Path, steps: int) -> dict[str, Any]:
    """What differs between two runs, all zero or empty where nothing does."""
    lines = {output: read_lines(output / METRICS_FILE) for output in (unbroken, killed)}
    counted = collections.Counter(line["step"] for line in lines[killed])
    one, other = ({line["step"]: line for line in found} for found in lines.values())
    values = {
        name: max(abs(one[step][name] - other[step][name]) for step in one.keys() & other.keys())
        for name in one[1].keys() - {"step", "tokens_per_second"}
    }
    states = [last_checkpoint(output, steps) for output in (unbroken, killed)]
    gaps = jax.tree.map(
        lambda a, b: float(np.max(np.abs(np.asarray(a, float) - np.asarray(b, float)), initial=0)),
        *(state["state"] for state in states),
    )
    return {
        "missing_steps": sorted(set(range(1, steps + 1)) - set(counted)),
        "doubled_steps": sorted(step for step, times in counted.items() if times > 1),
        "metrics": {name: gap for name, gap in sorted(values.items()) if gap},
        "parameters": max(jax.tree.leaves(gaps["params"])),
        "optimizer": max(jax.tree.leaves(gaps["optimizer"])),
        "place_in_the_data": states[0]["place"] != states[1]["place"],
    }


def last_checkpoint(output: Path, step: int) -> Any:
    """Everything that is saved with a step."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager((output / "checkpoints").absolute()) as manager:
        return manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(), place=ocp.args.JsonRestore()),
        )


def page(report: dict[str, Any]) -> str:
    """The report as markdown."""
    kills, seconds, found = report["kills"], report["seconds"], report["differences"]
    cut = sum(kill["cut_a_save"] for kill in kills)
    lines = [
        "# A run that is killed",
        "",
        f"`{report['command']}` at commit `{report['commit']}`, jax {report['versions']['jax']}, "
        f"orbax-checkpoint {report['versions']['orbax-checkpoint']}; {report['machine']}.",
        "",
        f"{report['steps']} steps of `kvjax train`, saved every {report['save_seconds']:g} s: "
        f"unbroken in {seconds['unbroken']:.0f} s, and in {seconds['killed']:.0f} s with "
        f"{len(kills)} kills (SIGKILL), {cut} of which left a checkpoint half written.",
        "",
        f"**{'Equal to the bit' if report['equal'] else 'Not equal'}**: last parameters differ by "
        f"{found['parameters']:g} and the optimizer's state by {found['optimizer']:g} at most, "
        f"the place in the data {'differs' if found['place_in_the_data'] else 'is the same'}; "
        f"{len(found['missing_steps'])} steps are missing in the metrics, "
        f"{len(found['doubled_steps'])} twice there, and "
        f"{', '.join(found['metrics']) or 'none'} of the values differ at any step.",
        "",
        "| kill | at step | cut a save | resumed at | steps repeated | s until there again |",
        "|---|---|---|---|---|---|",
    ]
    for number, kill in enumerate(kills, 1):
        back = "killed before" if kill["seconds_back"] is None else f"{kill['seconds_back']:.1f}"
        lines.append(
            f"| {number} | {kill['step']} | {'yes' if kill['cut_a_save'] else 'no'} | "
            f"{kill['resumed']} | {kill['repeated']} | {back} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="what the steps take unbroken")
    parser.add_argument("--steps", type=int, help="instead of as many as take --minutes")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--save-seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvjax-soak-") as folder:
        found = soak(Path(folder), args)
    report = {
        "command": " ".join(["python -m benchmarks.soak", *sys.argv[1:]]),
        "commit": commit(),
        "versions": versions(),
        "machine": f"{machine()}, {os.cpu_count()} cores",
        "seed": args.seed,
        **found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "soak.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (args.out / "soak.md").write_text(page(report), encoding="utf-8")
    print(page(report))
    return 0 if report["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
