"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from eval import parts as parts_module
from eval.parts import Part, heading
from eval.records import Results
from eval.summary import Row
from eval.tables import (
    DIFFERENCE_HEADINGS,
    HEADINGS,
    NOTES,
    budget_label,
    budgets,
    cells,
    difference_cells,
    differences,
    failure_lines,
    family_table,
    mark,
    set_up,
    template_text,
)

_MARKS = ("**{}**", "{} ≈", "{}")


def markdown(parts: Sequence[Part]) -> str:
    """A Markdown page: what ran, a table per section, differences, absences, failures."""
    lines = []
    if len(parts) > 1:
        lines += ["# Evaluation\n", *(f"* {_escaped(part.title)}" for part in parts), ""]
    for part in parts:
        lines += _part(part, "##" if len(parts) > 1 else "#")
    notes = [f"* {_escaped(line)}" for line in NOTES.split("\n")]
    return "\n".join([*lines, "#" * min(2, len(parts) + 1) + " Notes\n", *notes]) + "\n"


def _part(part: Part, level: str) -> list[str]:
    results, below = part.results, f"{level}#"
    needles = all(task.name == "needle" for task in results.config.tasks)
    title = part.title if level == "##" else results.config.model
    name = ": needles in a bounded cache" if needles and level == "#" else ""
    lines = [f"{level} {_escaped(title)}{name}\n", f"{_intro(results)}\n"]
    lines += [f"* **{_escaped(warning)}**" for warning in parts_module.warnings(part)] + [""]
    for family in part.families:
        lines.append(f"{below} {_heading(family.task, family.haystack, family.length)}\n")
        for budget in budgets(family.means):
            lines.append(f"{below}# {budget_label(budget)}\n")
            table = [
                [mark(_escaped(shown), kind, *_MARKS) for shown, kind in line]
                for line in family_table(family, part, budget)
            ]
            lines += [*_table(table, 1), ""]
        title = _escaped(f"Costs, mean of {len(family.sections)} tasks")
        lines += [f"{below}# {title}\n", *_rows(family.means, part), ""]
    for section, rows in part.rows.items():
        lines.append(f"{below} {_heading(section.task, section.haystack, section.length)}\n")
        lines += [*_rows(rows, part), ""]
    for title, pairs in differences(part):
        lines += [f"{below} {title}\n"]
        lines += ["Paired bootstrap on the same samples, 95 %.\n"]
        table = [list(DIFFERENCE_HEADINGS)]
        table += [[_escaped(cell) for cell in difference_cells(pair)] for pair in pairs]
        lines += [*_table(table, 4, last=1), ""]
    if results.absent:
        lines.append(f"{below} Absent tasks\n")
        lines += [f"* {_escaped(task)}: {_escaped(reason)}" for task, reason in results.absent]
        lines.append("")
    count = len(results.failures)
    lines.append(f"{below} Failures\n\n{count or 'No'} answer{'' if count == 1 else 's'} failed.")
    lines += [
        f"* {_escaped(policy)}, {budget}: {_escaped(error)} ({_escaped(ids)})"
        for policy, budget, error, ids in failure_lines(results)
    ]
    lines += ["", f"{below} Set-up\n"]
    facts = set_up(results) | {"prompt template": repr(template_text(results))}
    lines += [f"* {_escaped(name)}: {_escaped(value)}" for name, value in facts.items() if value]
    return [*lines, ""]


def _intro(results: Results) -> str:
    config = results.config
    return (
        f"Question {config.question} from the compressor; {len(results.samples)} samples; seed "
        f"{config.seed}; {parts_module.answer_length(config)}."
    )


def _heading(task: str, haystack: str, length: int | None) -> str:
    return _escaped(heading(task, haystack, length))


def _rows(rows: Sequence[Row], part: Part) -> list[str]:
    lines = [list(HEADINGS)]
    for row in rows:
        shown = [_escaped(cell) for cell in cells(row)]
        shown[2] = mark(shown[2], part.verdict(row), *_MARKS)
        lines.append(shown)
    return _table(lines, 2)


def _table(lines: Sequence[Sequence[str]], left: int, last: int = 0) -> list[str]:
    """A Markdown table; the first `left` and the `last` columns are aligned left."""
    width = len(lines[0])
    rule = ["---" if i < left or i >= width - last else "--:" for i in range(width)]
    head, *rest = [f"| {' | '.join(line)} |" for line in lines]
    return [head, f"|{'|'.join(rule)}|", *rest]


def _escaped(value: str) -> str:
    """One line of Markdown that shows `value` as it is."""
    flat = " ".join(value.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in flat)
