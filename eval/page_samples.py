"""Single samples on the page: what each policy kept of the prompt, and what it answered."""

from __future__ import annotations

import html as html_module
from collections.abc import Iterable

from eval import tables
from eval.records import Record, SampleResult

# Characters shown; results.json has the whole texts.
_EXCERPT, _QUESTION, _ANSWER = 1200, 700, 240


def sample(result: SampleResult) -> str:
    """A closed box with the text around what was asked for, and a line per policy and budget."""
    full = next((r.score for r in result.records if r.policy == "full"), 1.0)
    lines = []
    for r in result.records:
        said = (
            e(shortened(r.answer.strip(), _ANSWER)) if r.error is None else f"<em>{e(r.error)}</em>"
        )
        needle = "–" if r.needle_kept is None else f"{100 * r.needle_kept:.0f} %"
        cells = [
            e(tables.budget_label(r.budget)),
            _strip(result, r),
            needle,
            f"{r.score:.2f}",
            said,
        ]
        mark = "hit" if r.score >= full else "miss"
        lines.append(f"<tr class={mark}><th>{e(r.policy)}</th>{td(cells)}</tr>")
    asked = e(shortened(result.question, _QUESTION))
    answers = e(shortened(", ".join(result.answers), _ANSWER))
    return (
        f"<details class=sample><summary>{e(result.id)}</summary>{_excerpt(result)}"
        f"<p>{asked} <b>{answers}</b></p>"
        "<div class=wide><table class=answers><thead><tr><th>policy</th><th>budget</th>"
        "<th>kept</th><th>of needles</th><th>score</th><th>answer</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def shortened(text: str, most: int) -> str:
    """`text`, of a longer one its start and end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 5]} […] {text[len(text) - end :]}"


def td(cells: Iterable[str]) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells)


def e(text: str) -> str:
    return html_module.escape(text, quote=True)


def _excerpt(result: SampleResult) -> str:
    if not result.excerpt.strip():
        return ""
    excerpt = e(shortened(result.excerpt, _EXCERPT))
    if needle := e(str(result.metadata.get("needle", ""))):
        excerpt = excerpt.replace(needle, f"<mark>{needle}</mark>")
    return f"<blockquote>{excerpt}</blockquote>"


def _strip(result: SampleResult, record: Record) -> str:
    """The prompt from start to end, its ink the share kept; the needles are marked below."""
    count = len(record.kept_profile)
    if not count:
        return ""
    cells = "".join(
        f'<rect x="{i}" width="1.02" height="4" fill-opacity="{share:g}"/>'
        for i, share in enumerate(record.kept_profile)
        if share
    )
    for start, end in result.needle_tokens:
        at, width = (count * n / max(1, result.prompt_tokens) for n in (start, end - start))
        cells += (
            f'<rect class=needle x="{at:.2f}" y="4" width="{max(0.6, width):.2f}" height="1.4"/>'
        )
    return (
        f'<svg class=strip viewBox="0 0 {count} 5.4" preserveAspectRatio="none" '
        f'aria-hidden="true">{cells}</svg>'
    )
