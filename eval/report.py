"""results.json, results.md and report.html of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from eval import page, summary, tables
from eval.records import FORMAT, Results, write_atomically


def write(results: Results, directory: str | Path) -> list[Path]:
    """Writes the three files, each whole or not at all, and returns their paths."""
    contents = {
        "results.json": json.dumps(as_json(results), indent=1, ensure_ascii=False, allow_nan=False)
        + "\n",
        "results.md": tables.markdown(results),
        "report.html": page.html(results),
    }
    paths = []
    for name, content in contents.items():
        path = Path(directory) / name
        write_atomically(path, content)
        paths.append(path)
    return paths


def as_json(results: Results) -> dict[str, Any]:
    """Everything about the run, in plain values."""
    return {
        "format": FORMAT,
        "config": dataclasses.asdict(results.config),
        "config_hash": results.config.hash,
        "environment": dict(results.environment),
        "prompt": dict(results.prompt),
        "summaries": [dataclasses.asdict(row) for row in summary.rows(results)],
        "differences": [
            dataclasses.asdict(c) | {"significant": c.difference.significant}
            for c in summary.comparisons(results)
        ],
        "failures": [
            {"sample": s.id, "policy": r.policy, "budget": r.budget, "error": r.error}
            for s, r in results.failures
        ],
        "samples": [dataclasses.asdict(sample) for sample in results.samples],
    }
