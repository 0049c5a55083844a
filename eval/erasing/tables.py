"""Results of erasing as Markdown: cell by cell, every method between its two ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.durable import write_atomically
from eval.erasing.config import ErasingConfig
from eval.erasing.measure import NONE, RECOMPUTE, Measured
from eval.erasing.records import ErasingResult, Finished
from eval.statistics import Estimate, estimate, paired_difference

_HEAD = (
    "| method | exact match | distractor | NLL | KL to recompute | NLL gap closed "
    "| KL minus mask's |",
    "|---|--:|--:|--:|--:|--:|--:|",
)
NOTES = (
    "Exact match: the greedy reply begins with the right answer. Distractor: it has what the span "
    "says. NLL and KL: nats per token of the right answer. NLL gap closed: 1 at recomputation, 0 "
    "without erasing. Intervals are 95 %; differences are paired, and those whose interval covers "
    "0 are marked (=). Shown is the whole cell; its heading gives the share of samples that "
    "recomputation solves and no erasing fails."
)


def write(
    finished: Finished, directory: Path, results: Sequence[ErasingResult] | None = None
) -> tuple[Path, str]:
    """`results.md` of a journal, finished or not, or of those of its results; and its text."""
    given = list(finished.results.values()) if results is None else results
    planned = finished.header.get("planned")
    page = markdown(finished.config, given, finished.environment, planned)
    path = directory / "results.md"
    write_atomically(path, page)
    return path, page


def markdown(
    config: ErasingConfig,
    results: Sequence[ErasingResult],
    environment: Mapping[str, Any],
    planned: int | None = None,
) -> str:
    """One page: a table for each cell, what failed, and how it was made."""
    cells: dict[str, list[ErasingResult]] = {}
    for result in results:
        cells.setdefault(result.cell, []).append(result)
    lines = [f"# Erasing on {config.model}", "", NOTES, ""]
    if planned is not None and len(results) < planned:
        done = f"{len(results)} of {planned} planned samples are there."
        lines += [f"**The run is not finished: {done}**", ""]
    for cell, found in cells.items():
        lines += [*_cell(cell, found), ""]
    if failed := [result for result in results if result.error is not None]:
        lines += ["## Failures", "", f"Not in the tables: samples that failed, {len(failed)}.", ""]
        lines += [*(f"* {result.id}: {result.error}" for result in failed), ""]
    lines += ["## Set-up", "", f"* config: {config.hash}"]
    lines += [f"* {name}: {value}" for name, value in environment.items()]
    return "\n".join(lines) + "\n"


def _cell(cell: str, results: Sequence[ErasingResult]) -> list[str]:
    found = [result for result in results if result.error is None]
    failed = f" ({len(results) - len(found)} more failed)" if len(found) < len(results) else ""
    if not found:
        return [f"## {cell}", "", f"n = 0{failed}."]
    by_method: dict[str, list[Measured]] = {}
    for result in found:
        for record in result.records:
            by_method.setdefault(record.method, []).append(record)
    none, full = by_method[NONE], by_method[RECOMPUTE]
    telling = [f.exact == 1 and n.exact == 0 for n, f in zip(none, full, strict=True)]
    rows = [_row(method, by_method) for method in by_method]
    return [
        f"## {cell}",
        "",
        f"n = {len(found)}{failed}; recomputation solves and no erasing fails "
        f"{np.mean(telling):.0%}.",
        "",
        *_HEAD,
        *rows,
    ]


def _row(method: str, by_method: dict[str, list[Measured]]) -> str:
    mine = by_method[method]
    cells = [
        _percent(estimate([m.exact for m in mine])),
        _percent(estimate([m.distractor for m in mine])),
        _number(estimate([m.nll for m in mine])),
        _number(estimate([m.kl for m in mine])),
        _closed(mine, by_method[NONE], by_method[RECOMPUTE]),
        _against(mine, by_method.get("mask")),
    ]
    return f"| {method} | {' | '.join(cells)} |"


def _closed(mine: Sequence[Measured], none: Sequence[Measured], full: Sequence[Measured]) -> str:
    """1 - (NLL - recomputed NLL) / (unerased NLL - recomputed NLL), of the cell's means."""
    own, low, high = (np.mean([m.nll for m in part]) for part in (mine, full, none))
    return f"{1 - (own - low) / (high - low):.2f}" if high - low > 1e-6 else "–"


def _against(mine: Sequence[Measured], mask: Sequence[Measured] | None) -> str:
    if mask is None or mine is mask:
        return ""
    difference = paired_difference([m.kl for m in mine], [m.kl for m in mask])
    sign = "" if difference.significant else " (=)"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]{sign}"


def _percent(value: Estimate) -> str:
    return f"{value.mean:.2f} [{value.low:.2f}, {value.high:.2f}]"


def _number(value: Estimate) -> str:
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"
