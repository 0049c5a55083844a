"""What each part of the retention gates' training is worth, in one table.

    python benchmarks/retention_ablations.py

Trains a gate for every variant with the same small recipe (needles in synthetic sentences, fewer
and shorter rows than configs/retention_smollm2.yaml), then asks all of them for needles in prose,
question hidden, through `kvjax eval`. Every part resumes where a killed run left it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

BASE: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "module": {
        "kind": "retention",
        "name": "retention-global",
        "gate": "rg10",
        "width": 128,
        "bias": 8.0,
        "memory": 64,
        "capacity": "global",
    },
    "data": [
        {"task": "needle", "haystacks": ["sentences"], "lengths": [200, 480]},
        {"task": "needle", "haystacks": ["sentences"], "lengths": [200, 480], "keys": 4},
    ],
    "length": 512,
    "steps": 60,
    "optimizer": {"learning_rate": 3.0e-3, "schedule": "wsd", "warmup": 6, "decay": 0.3},
    "checkpoint": {"steps": 30, "minutes": 5, "keep": 1},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without-capacity": {"capacity_weight": 0.0},
    "without-kl": {"kl": False},
    "without-ce": {"ce": False},
    "untied": {"share_output": False},
    "local-capacity": {"capacity": "local"},
    "local": {"capacity": "local", "name": "retention-local"},
}
LOOKAHEADS = (2, 128)


def training(variant: str, directory: Path) -> dict[str, Any]:
    module = BASE["module"] | VARIANTS[variant]
    return BASE | {"module": module, "output": str(directory / variant)}


def evaluation(directory: Path, samples: int) -> dict[str, Any]:
    policies: list[Any] = ["full"]
    for variant, changed in VARIANTS.items():
        name = changed.get("name", "retention-global")
        policies.append({name: {"path": str(directory / variant / "export")}})
    whole = str(directory / "whole" / "export")
    policies += [{"retention-global": {"path": whole, "lookahead": n}} for n in LOOKAHEADS]
    return {
        "model": BASE["model"],
        "tasks": [
            {
                "name": "needle",
                "haystacks": ["prose"],
                "lengths": [900],
                "depths": [0.0, 0.25, 0.5, 0.75, 1.0],
                "samples": samples,
            }
        ],
        "policies": policies,
        "budgets": [0.25, 0.125, 0.0625],
        "question": "hidden",
        "max_new_tokens": 16,
        "seed": 0,
        "output": str(directory / "eval"),
    }


def main() -> None:
    from kvjax.cli.main import main as kvjax

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/retention_ablations"))
    parser.add_argument("--samples", type=int, default=10, help="of each of five depths")
    arguments = parser.parse_args()
    directory = arguments.output
    directory.mkdir(parents=True, exist_ok=True)

    def written(name: str, content: dict[str, Any]) -> str:
        path = directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return str(path)

    for variant in VARIANTS:
        if not (directory / variant / "export" / "card.json").exists():
            kvjax(["train", written(variant, training(variant, directory))])
    kvjax(["eval", "--config", written("eval", evaluation(directory, arguments.samples))])


if __name__ == "__main__":
    main()
