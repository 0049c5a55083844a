"""The report as one HTML page: no scripts, nothing loaded, all foreign text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from eval import parts as parts_module
from eval import plots, summary, tables
from eval.families import Family
from eval.page_samples import e, sample, td
from eval.parts import Part, heading
from eval.records import Results
from eval.summary import Pair, Row, Section

_NO_PLOTS = "<p class=note>No plots: they need matplotlib (the extra <code>plot</code>).</p>"
# All with room for the sign, so that numbers stand below one another.
_MARKS = ("<b>{}</b><i class=sign></i>", "{}<i class=sign>≈</i>", "{}<i class=sign></i>")


def html(parts: Sequence[Part]) -> str:
    """The whole page."""
    style = resources.files("eval").joinpath("page.css").read_text(encoding="utf-8")
    models = e(", ".join(dict.fromkeys(part.results.config.model for part in parts)))
    title = _title(parts)
    body = ["<header>", f"<p class=kicker>kvjax eval · {models}</p>", f"<h1>{title}</h1>"]
    if len(parts) > 1:
        links = (
            f'<li><a href="#part-{i}">{e(part.title)}</a></li>' for i, part in enumerate(parts)
        )
        body.append(
            f"<p class=lead>{len(parts)} evaluations that differ in model or protocol, one after "
            f"the other. No score is shared between them.</p><ul>{''.join(links)}</ul></header>"
        )
    for index, part in enumerate(parts):
        body += _part(part, index, alone=len(parts) == 1)
    notes = "".join(f"<li>{e(line)}</li>" for line in tables.NOTES.split("\n"))
    body.append(f"<section><h2>Notes</h2><ul class=note>{notes}</ul></section>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title} · {models}</title>\n<style>\n{style}</style>\n"
        "</head>\n<body>\n<main>\n" + "\n".join(text for text in body if text) + "\n</main>\n"
        "</body>\n</html>\n"
    )


def _title(parts: Sequence[Part]) -> str:
    names = list(dict.fromkeys(t.name for part in parts for t in part.results.config.tasks))
    if names == ["needle"]:
        return "Finding needles in a bounded cache"
    return f"{e(', '.join(names))} from a bounded cache"


def _part(part: Part, index: int, alone: bool) -> list[str]:
    """A run's header, its tables, and what a reader needs in order to trust them."""
    lead = f"<p class=lead>{_lead(part)}</p>"
    # Of one run the page's header is its own.
    head = lead if alone else f'<header id="part-{index}"><h1 class=part>{e(part.title)}</h1>{lead}'
    return [
        head + _warnings(part) + _cards(part) + "</header>",
        *(_family(part, family) for family in part.families),
        *_tasks(part),
        *(_differences(title, pairs) for title, pairs in tables.differences(part)),
        _worst(part.results),
        _absent(part.results),
        _failures(part.results),
        _setup(part.results),
    ]


def _lead(part: Part) -> str:
    config = part.results.config
    seen = {
        "hidden": "The question was hidden from the compressor",
        "seen": "The compressor saw the question",
    }[config.question]
    tasks = len({section.task for section in part.sections})
    count = f"{tasks} task{'' if tasks == 1 else 's'}"
    return (
        f"{seen}. {len(part.results.samples)} samples of {count}, each context prefilled once for "
        f"all policies; seed {config.seed}; {parts_module.answer_length(config)}. Intervals are "
        "95 %."
    )


def _warnings(part: Part) -> str:
    found = parts_module.warnings(part)
    if not found:
        return ""
    return f"<ul class=warnings>{''.join(f'<li>{e(text)}</li>' for text in found)}</ul>"


def _cards(part: Part) -> str:
    """The full cache, and the best policy of every budget; families as their means."""
    groups = [(f.task, f.haystack, f.length, f.means) for f in part.families]
    groups += [(s.task, s.haystack, s.length, tuple(part.rows[s])) for s in part.alone]
    cards = []
    for task, haystack, length, rows in groups:
        lines = []
        by_budget: dict[str, list[Row]] = {}
        for row in rows:
            if row.score is not None:
                by_budget.setdefault(row.budget, []).append(row)
        for budget, group in by_budget.items():
            means = [row.score.mean for row in group if row.score]
            best = group[means.index(max(means))]
            tied = means.count(max(means)) - 1
            if max(means) == 0:
                name = "none"
            else:
                name = e(best.policy) + (f" and {tied} more" if tied else "")
            label = "full cache" if budget == "full" else f"{tables.budget_label(budget)}: {name}"
            lines.append(f"<div><dt>{label}</dt><dd>{max(means):.2f}</dd></div>")
        name = e(heading(task, haystack, length))
        cards.append(f"<div class=card><h3>{name}</h3><dl>{''.join(lines)}</dl></div>")
    return f"<div class=cards>{''.join(cards)}</div>"


def _family(part: Part, family: Family) -> str:
    name = heading(family.task, family.haystack, family.length)
    key = f"{part.title} {name}"
    body = [f"<section><h2>{e(name)}</h2>"]
    if plots.available():
        body.append(
            f"<figure>{plots.score_against_bytes(key, family.means)}<figcaption>Mean of the tasks "
            "against their mean of measured cache bytes. The star and the dashed line are the full "
            "cache.</figcaption></figure>"
        )
    for budget in tables.budgets(family.means):
        label = "full cache" if budget == "full" else tables.budget_label(budget)
        body.append(f"<h3>{label}</h3>{_grid(tables.family_table(family, part, budget))}")
    body.append(f"<h3>Means and costs</h3>{_table(part, family.means)}")
    if plots.available():
        curves = {
            heading(section.task.partition("/")[2], section.haystack, None): part.rows[section]
            for section in family.sections
        }
        body.append(
            f"<details><summary>Curves of the {len(curves)} tasks</summary><figure>"
            f"{plots.scores_of_tasks(key, curves)}</figure></details>"
        )
    return "".join(body) + "</section>"


def _grid(lines: list[list[tuple[str, str]]]) -> str:
    """Tasks down, policies across; the last two lines are the mean and its interval."""
    head = "".join(f"<th>{e(text)}</th>" for text, _ in lines[0])
    body = []
    for index, line in enumerate(lines[1:]):
        cells = [f"<td>{tables.mark(e(text), kind, *_MARKS)}</td>" for text, kind in line[1:]]
        style = {len(lines) - 3: " class='start mean'", len(lines) - 2: " class=dim"}
        body.append(f"<tr{style.get(index, '')}><th>{e(line[0][0])}</th>{''.join(cells)}</tr>")
    return (
        f"<div class=wide><table class=grid><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _tasks(part: Part) -> list[str]:
    """Every task and haystack with a table per length; those of families closed."""
    groups: dict[tuple[str, str], list[Section]] = {}
    for section in part.sections:
        groups.setdefault((section.task, section.haystack), []).append(section)
    alone = set(part.alone)
    found = []
    for group in groups.values():
        mine = [section for section in group if section in alone]
        if mine:
            text = "".join(_section(part, section, len(group) > 1) for section in mine)
            found.append(
                f"<section><h2>{e(_group(group))}</h2>{text}{_depths(part, group)}</section>"
            )
    families = []
    for group in groups.values():
        rest = [section for section in group if section not in alone]
        if rest:
            text = "".join(
                (f"<h3>{section.length} tokens</h3>" if len(group) > 1 else "")
                + _table(part, part.rows[section])
                for section in rest
            )
            families.append(
                f"<details><summary>{e(_group(group))}</summary>{text}"
                f"{_depths(part, group) if not set(group) & alone else ''}</details>"
            )
    if families:
        found.append(f"<section><h2>Task by task</h2>{''.join(families)}</section>")
    return found


def _group(group: list[Section]) -> str:
    first = group[0]
    return heading(first.task, first.haystack, first.length if len(group) == 1 else None)


def _section(part: Part, section: Section, titled: bool) -> str:
    """The curve and the table of one length."""
    name = heading(section.task, section.haystack, section.length)
    title = f"<h3>{e(name)}</h3>" if titled else ""
    figure = _NO_PLOTS
    if plots.available():
        curve = plots.score_against_bytes(f"{part.title} {name}", part.rows[section])
        figure = (
            f"<figure>{curve}<figcaption>Score against measured cache bytes. The star and the "
            "dashed line are the full cache.</figcaption></figure>"
        )
    return title + figure + _table(part, part.rows[section])


def _depths(part: Part, group: list[Section]) -> str:
    """The heat map over all lengths, where a task has depths."""
    samples = [sample for section in group for sample in part.sections[section]]
    if not plots.available() or not plots.has_depths(samples):
        return ""
    key = f"{part.title} {group[0].task} {group[0].haystack}"
    there = {(r.policy, r.budget) for s in samples for r in s.records}
    columns = [column for column in summary.columns(part.results) if column in there]
    return (
        f"<figure>{plots.depth_by_length(key, samples, columns)}<figcaption>Score by depth of the "
        "needle (down) and length of the prompt (across).</figcaption></figure>"
    )


def _table(part: Part, rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{name}</th>" for name in tables.HEADINGS)
    lines, last = [], None
    for row in rows:
        cells = [e(cell) for cell in tables.cells(row)]
        verdict = part.verdict(row)
        cells[2] = tables.mark(cells[2], verdict, *_MARKS)
        if row.score is not None:
            s = row.score
            low, width, mean = (f"{100 * x:.1f}%" for x in (s.low, s.high - s.low, s.mean))
            bar = (
                f"<span class=bar><i style='left:{low};width:{width}'></i>"
                f"<b style='left:{mean}'></b></span>"
            )
            cells[3] = f"{bar}<small>{cells[3]}</small>"
        start = " class=start" if row.budget != last else ""
        last = row.budget
        lines.append(f"<tr{start}><th>{cells[0]}</th>{td(cells[1:])}</tr>")
    return (
        f"<div class=wide><table class=scores><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _differences(title: str, pairs: Sequence[Pair]) -> str:
    groups: dict[str, list[str]] = {}
    for pair in pairs:
        name, *cells = map(e, tables.difference_cells(pair))
        cells[-1] = f"<small>{cells[-1]}</small>"
        dim = "" if pair.difference.significant else " class=dim"
        groups.setdefault(name, []).append(f"<tr{dim}>{td(cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in tables.DIFFERENCE_HEADINGS[1:])
    boxes = "".join(
        f"<details><summary>{name}</summary><div class=wide><table class=pairs><thead><tr>{head}"
        f"</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
        for name, lines in groups.items()
    )
    return (
        f"<section><h2>{title}</h2><p>On the same samples, by paired "
        "bootstrap. A difference whose interval covers 0 is not significant. Differences between "
        f"all pairs are in results.json.</p>{boxes}</section>"
    )


def _worst(results: Results) -> str:
    samples = summary.worst(results)
    if not samples:
        return ""
    return (
        "<section><h2>Worst samples</h2><p>Where evicting lost most of what the full cache scored. "
        "The strip is the prompt from start to end: the fuller its "
        "ink, the more layers and heads kept it; the marks are the needles.</p>"
        + "".join(sample(result) for result in samples)
        + "</section>"
    )


def _absent(results: Results) -> str:
    if not results.absent:
        return ""
    lines = "".join(f"<tr><th>{e(task)}</th>{td([e(why)])}</tr>" for task, why in results.absent)
    return (
        "<section><h2>Absent tasks</h2><p>The run asked for them and could not make them.</p>"
        f"<div class=wide><table class=long><tbody>{lines}</tbody></table></div></section>"
    )


def _failures(results: Results) -> str:
    count = len(results.failures)
    if not count:
        return "<section><h2>Failures</h2><p>None: every sample was answered.</p></section>"
    found = tables.failure_lines(results)
    lines = ""
    for policy, budget, error, ids in found:
        lines += f"<tr><th>{e(policy)}</th>{td(map(e, (budget, error, ids)))}</tr>"
    said = f"{count} answer{'' if count == 1 else 's'} failed; each counts as wrong."
    return (
        f"<section><h2>Failures</h2><p>{said}</p>"
        f"<details{' open' if len(found) <= 10 else ''}><summary>All failures</summary>"
        f"<div class=wide><table class=long><tbody>{lines}</tbody></table></div></details>"
        "</section>"
    )


def _setup(results: Results) -> str:
    items = "".join(
        f"<div><dt>{e(name)}</dt><dd>{e(value)}</dd></div>"
        for name, value in tables.set_up(results).items()
    )
    return (
        f"<section><h2>Set-up</h2><dl class=facts>{items}</dl><details><summary>Prompt template"
        f"</summary><pre>{e(tables.template_text(results))}</pre></details></section>"
    )
