"""The report as one HTML page: no scripts, nothing loaded, all foreign text escaped."""

from __future__ import annotations

import html as html_module
from collections.abc import Iterable
from importlib import resources

from eval import plots, summary, tables
from eval.records import Record, Results, SampleResult
from eval.summary import Row


def html(results: Results) -> str:
    """The whole page."""
    style = resources.files("eval").joinpath("page.css").read_text(encoding="utf-8")
    config = results.config
    body = [
        "<header>",
        f"<p class=kicker>kvjax eval · {_e(config.model)}</p>",
        f"<h1>{_title(results)}</h1>",
        f"<p class=lead>{_lead(results)}</p>",
        _cards(results),
        "</header>",
    ]
    for (task, haystack), rows in tables.by_section(results):
        body.append(f"<section><h2>{_e(task)} in {_e(haystack)}</h2>")
        body.append(_figures(results, task, haystack))
        body.append(_table(rows))
        body.append("</section>")
    body.append(f"<p class=note>{_e(tables.NOTES)}</p>")
    body += [_differences(results), _worst(results), _failures(results), _setup(results)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_title(results)} · {_e(config.model)}</title>\n<style>\n{style}</style>\n"
        "</head>\n<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n"
        "</body>\n</html>\n"
    )


def _title(results: Results) -> str:
    names = list(dict.fromkeys(task.name for task in results.config.tasks))
    if names == ["needle"]:
        return "Finding needles in a bounded cache"
    return f"{_e(', '.join(names))} from a bounded cache"


def _lead(results: Results) -> str:
    config = results.config
    seen = {
        "hidden": "The question was hidden from the compressor",
        "seen": "The compressor saw the question",
    }[config.question]
    per = len(results.samples) // max(1, len(summary.sections(results)))
    return (
        f"{seen}. {per} samples per haystack, each prefilled once for all policies; seed "
        f"{config.seed}; at most {config.max_new_tokens} new tokens. Intervals are 95 %."
    )


def _cards(results: Results) -> str:
    """The full cache, and the best policy of every budget, haystacks apart."""
    cards = []
    for (_, haystack), rows in tables.by_section(results):
        lines = []
        by_budget: dict[str, list[Row]] = {}
        for row in rows:
            by_budget.setdefault(row.budget, []).append(row)
        for budget, group in by_budget.items():
            best = max(group, key=lambda row: row.score.mean)
            tied = sum(row.score.mean == best.score.mean for row in group) - 1
            if best.score.mean == 0:
                name = "none"
            else:
                name = _e(best.policy) + (f" and {tied} more" if tied else "")
            label = "full cache" if budget == "full" else f"{tables.budget_label(budget)}: {name}"
            lines.append(f"<div><dt>{label}</dt><dd>{best.score.mean:.2f}</dd></div>")
        cards.append(f"<div class=card><h3>{_e(haystack)}</h3><dl>{''.join(lines)}</dl></div>")
    return f"<div class=cards>{''.join(cards)}</div>"


def _figures(results: Results, task: str, haystack: str) -> str:
    if not plots.available():
        return "<p class=note>No plots: they need matplotlib (the extra <code>plot</code>).</p>"
    return (
        "<figure>"
        + plots.score_against_bytes(results, task, haystack)
        + "<figcaption>Score against measured cache bytes. The star and the dashed line are the "
        "full cache.</figcaption></figure><figure>"
        + plots.depth_by_length(results, task, haystack)
        + "<figcaption>Score by depth of the needle (down) and length of the prompt (across)."
        "</figcaption></figure>"
    )


def _table(rows: list[Row]) -> str:
    head = "".join(f"<th>{name}</th>" for name in tables.HEADINGS)
    lines, last = [], None
    for row in rows:
        cells = [_e(cell) for cell in tables.cells(row)]
        s = row.score
        low, width, mean = (f"{100 * x:.1f}%" for x in (s.low, s.high - s.low, s.mean))
        bar = (
            f"<span class=bar><i style='left:{low};width:{width}'></i>"
            f"<b style='left:{mean}'></b></span>"
        )
        cells[3] = f"{bar}<small>{cells[3]}</small>"
        start = " class=start" if row.budget != last else ""
        last = row.budget
        lines.append(f"<tr{start}><th>{cells[0]}</th>{_td(cells[1:])}</tr>")
    return (
        f"<div class=wide><table class=scores><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _differences(results: Results) -> str:
    comparisons = summary.comparisons(results)
    if not comparisons:
        return ""
    lines = []
    for c in comparisons:
        d = c.difference
        verdict = "" if d.significant else "not significant"
        cells = [
            _e(c.haystack),
            _e(tables.budget_label(c.budget)),
            _e(c.best),
            _e(c.other),
            f"{d.mean:+.2f}",
            f"{d.low:+.2f} – {d.high:+.2f}",
            f"<small>{verdict}</small>",
        ]
        dim = "" if d.significant else " class=dim"
        lines.append(f"<tr{dim}>{_td(cells)}</tr>")
    names = ("haystack", "budget", "best", "other", "difference", "interval", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        "<section><h2>Differences to the best policy</h2><p>On the same samples, by paired "
        "bootstrap. A difference whose interval covers 0 is not significant.</p>"
        "<details><summary>All pairs</summary><div class=wide><table class=pairs><thead><tr>"
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details></section>"
    )


def _worst(results: Results) -> str:
    samples = summary.worst(results)
    if not samples:
        return ""
    return (
        "<section><h2>Worst samples</h2><p>Answered from the full cache, missed by most policies. "
        "The strip is the prompt from start to end: the fuller its "
        "ink, the more layers and heads kept it; the mark is the needle.</p>"
        + "".join(_sample(sample) for sample in samples)
        + "</section>"
    )


def _sample(sample: SampleResult) -> str:
    lines = []
    for r in sample.records:
        said = _e(r.answer.strip()) if r.error is None else f"<em>{_e(r.error)}</em>"
        mark = "hit" if r.score == 1 else "miss"
        needle = "–" if r.needle_kept is None else f"{100 * r.needle_kept:.0f} %"
        cells = [_e(tables.budget_label(r.budget)), _strip(sample, r), needle, said]
        lines.append(f"<tr class={mark}><th>{_e(r.policy)}</th>{_td(cells)}</tr>")
    needle = str(sample.metadata.get("needle", ""))
    excerpt = _e(sample.excerpt)
    if needle:
        excerpt = excerpt.replace(_e(needle), f"<mark>{_e(needle)}</mark>")
    return (
        f"<details class=sample><summary>{_e(sample.id)}</summary>"
        f"<blockquote>{excerpt}</blockquote>"
        f"<p>{_e(sample.question)} <b>{_e(', '.join(sample.answers))}</b></p>"
        "<div class=wide><table class=answers><thead><tr><th>policy</th><th>budget</th>"
        "<th>kept</th><th>of needle</th><th>answer</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _strip(sample: SampleResult, record: Record) -> str:
    count = len(record.kept_profile)
    if not count:
        return ""
    cells = "".join(
        f'<rect x="{i}" width="1.02" height="4" fill-opacity="{share:g}"/>'
        for i, share in enumerate(record.kept_profile)
        if share
    )
    if sample.needle_tokens is not None and sample.prompt_tokens:
        tokens = sample.prompt_tokens
        at, end = (count * token / tokens for token in sample.needle_tokens)
        cells += (
            f'<rect class=needle x="{at:.2f}" y="4" width="{max(0.6, end - at):.2f}" height="1.4"/>'
        )
    return (
        f'<svg class=strip viewBox="0 0 {count} 5.4" preserveAspectRatio="none" '
        f'aria-hidden="true">{cells}</svg>'
    )


def _failures(results: Results) -> str:
    failures = results.failures
    if not failures:
        return "<section><h2>Failures</h2><p>None: every sample was answered.</p></section>"
    lines = ""
    for s, r in failures:
        cells = [_e(r.policy), _e(tables.budget_label(r.budget)), _e(r.error or "")]
        lines += f"<tr><th>{_e(s.id)}</th>{_td(cells)}</tr>"
    return (
        f"<section><h2>Failures</h2><p>{len(failures)} answers failed; each counts as wrong.</p>"
        f"<details{' open' if len(failures) <= 10 else ''}><summary>All failures</summary>"
        f"<div class=wide><table class=pairs><tbody>{lines}</tbody></table></div></details>"
        "</section>"
    )


def _setup(results: Results) -> str:
    environment = {k: v for k, v in results.environment.items() if v is not None}
    template = results.prompt.get("template", {})
    before, after = (template.get(key, "") for key in ("before_user", "after_user"))
    text = f"{before}⟨context⟩\n⟨question⟩{after}⟨answer prefix⟩"
    facts = environment | {
        "config": results.config.hash,
        "end tokens": ", ".join(str(t) for t in results.prompt.get("end_tokens", ())),
        "tokenised": results.prompt.get("tokenised", ""),
    }
    items = "".join(
        f"<div><dt>{_e(str(k))}</dt><dd>{_e(str(v))}</dd></div>" for k, v in facts.items()
    )
    return (
        f"<section><h2>Set-up</h2><dl class=facts>{items}</dl>"
        f"<details><summary>Prompt template</summary><pre>{_e(text)}</pre></details></section>"
    )


def _td(cells: Iterable[str]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _e(text: str) -> str:
    return html_module.escape(text, quote=True)
