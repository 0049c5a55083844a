"""results.json, results.md and report.html of one run, or of several side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import markdown, page
from eval import parts as parts_module
from eval.durable import write_atomically
from eval.journal import FORMAT
from eval.parts import Part
from eval.records import Results
from eval.summary import Pair


def write(results: Results | Sequence[Results], directory: str | Path) -> list[Path]:
    """Writes the three files, each whole or not at all, and returns their paths."""
    parts = parts_module.parts(results)
    content = {"format": FORMAT, "parts": [as_json(part) for part in parts]}
    texts = {
        "results.json": json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "results.md": markdown.markdown(parts),
        "report.html": page.html(parts),
    }
    paths = []
    for name, text in texts.items():
        path = Path(directory) / name
        write_atomically(path, text)
        paths.append(path)
    return paths


def as_json(part: Part) -> dict[str, Any]:
    """Everything about the runs of one model and protocol, in plain values."""
    results = part.results
    return {
        "title": part.title,
        "config": dataclasses.asdict(results.config),
        "config_hash": results.config.hash,
        "environment": dict(results.environment),
        "environments": [dict(one) for one in results.environments],
        "identity": dict(results.identity),
        "planned": dict(results.planned),
        "prompt": dict(results.prompt),
        "overhead": results.overhead,
        "warnings": parts_module.warnings(part),
        "absent": [{"task": task, "reason": reason} for task, reason in results.absent],
        "summaries": [dataclasses.asdict(row) for rows in part.rows.values() for row in rows],
        "families": [
            {
                "task": family.task,
                "haystack": family.haystack,
                "length": family.length,
                "tasks": [dataclasses.asdict(section) for section in family.sections],
                "summaries": [dataclasses.asdict(row) for row in family.means],
            }
            for family in part.families
        ],
        # Every two policies on the same samples, of sections and of families; first - second.
        "pairs": [_pair(pair) for pair in part.pairs],
        "differences": [_pair(pair) for pair in part.comparisons],
        "failures": [
            {"sample": s.id, "policy": r.policy, "budget": r.budget, "error": r.error}
            for s, r in results.failures
        ],
        "samples": [dataclasses.asdict(sample) for sample in results.samples],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return dataclasses.asdict(pair) | {"significant": pair.difference.significant}
