"""The same table for a terminal and for Markdown."""

from __future__ import annotations

from eval import summary
from eval.records import Results
from eval.summary import Row

HEADINGS = ("policy", "budget", "score", "95 % interval", "cache", "peak", "tok/s", "n")
NOTES = (
    "cache: sum of the sizes of one row's arrays, room for question and answer included; "
    "peak: with the full cache of the shared prefill; "
    "tok/s: decode steps per second, all policies of one budget side by side; "
    "failed answers count as 0."
)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of HEADINGS."""
    failed = f" ({row.failures} failed)" if row.failures else ""
    return (
        row.policy,
        budget_label(row.budget),
        f"{row.score.mean:.2f}",
        f"{row.score.low:.2f} – {row.score.high:.2f}",
        size(row.cache_bytes),
        size(row.peak_bytes),
        "–" if row.tokens_per_second is None else f"{row.tokens_per_second:.1f}",
        f"{row.score.n}{failed}",
    )


def text(results: Results) -> str:
    """Aligned columns, a title per haystack."""
    parts = []
    for (task, haystack), rows in by_section(results):
        lines = [HEADINGS, *(cells(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
        parts.append(f"{task} in {haystack}\n" + "\n".join(_aligned(x, widths) for x in lines))
    return "\n\n".join(parts)


def markdown(results: Results) -> str:
    """A Markdown page: what ran, a table per haystack, differences, failures."""
    config, environment = results.config, results.environment
    parts = [
        f"# {_escaped(config.model)}: needles in a bounded cache\n"
        if all(task.name == "needle" for task in config.tasks)
        else f"# {_escaped(config.model)}\n",
        f"Question {config.question} from the compressor; {len(results.samples)} samples; seed "
        f"{config.seed}; at most {config.max_new_tokens} new tokens. "
        + ", ".join(f"{_escaped(key)} {_escaped(str(v))}" for key, v in environment.items() if v)
        + ".\n",
    ]
    for (task, haystack), rows in by_section(results):
        parts.append(f"## {task} in {_escaped(haystack)}\n")
        parts.append("| " + " | ".join(HEADINGS) + " |")
        parts.append("|---|---" + "|--:" * (len(HEADINGS) - 2) + "|")
        parts += ["| " + " | ".join(_escaped(c) for c in cells(row)) + " |" for row in rows]
        parts.append("")
    parts.append(f"{NOTES}\n")
    comparisons = summary.comparisons(results)
    if comparisons:
        parts.append("## Differences to the best policy\n")
        parts.append("Paired bootstrap on the same samples, 95 %.\n")
        parts.append("| haystack | budget | best | other | difference | interval | |")
        parts.append("|---|---|---|---|--:|--:|---|")
        for c in comparisons:
            d = c.difference
            verdict = "" if d.significant else "not significant"
            parts.append(
                f"| {_escaped(c.haystack)} | {budget_label(c.budget)} | {_escaped(c.best)} | "
                f"{_escaped(c.other)} | {d.mean:+.2f} | {d.low:+.2f} – {d.high:+.2f} | {verdict} |"
            )
        parts.append("")
    failures = results.failures
    parts.append(f"## Failures\n\n{len(failures) or 'No'} answers failed.")
    for s, r in failures:
        where = f"{_escaped(s.id)}, {_escaped(r.policy)}, {budget_label(r.budget)}"
        parts.append(f"* {where}: {_escaped(r.error or '')}")
    return "\n".join(parts) + "\n"


def by_section(results: Results) -> list[tuple[tuple[str, str], list[Row]]]:
    rows = summary.rows(results)
    return [
        (section, [row for row in rows if (row.task, row.haystack) == section])
        for section in summary.sections(results)
    ]


def budget_label(budget: str) -> str:
    """25 %, 128 tokens, 1.0 MB, full."""
    if budget == "full":
        return "full"
    if budget.startswith("bytes:"):
        return size(float(budget.removeprefix("bytes:")))
    if "." in budget or "e" in budget:
        return f"{100 * float(budget):g} %"
    return f"{budget} tokens"


def size(count: float | None) -> str:
    """Bytes in decimal units."""
    if count is None:
        return "–"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def _aligned(line: tuple[str, ...], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
    return "  " + "  ".join(left + right).rstrip()


def _escaped(value: str) -> str:
    """One line of Markdown that shows `value` as it is."""
    flat = " ".join(value.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in flat)
