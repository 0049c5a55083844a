"""What every table shows, as text; and the tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eval import parts as parts_module
from eval.families import Family
from eval.parts import Part, heading
from eval.records import Results
from eval.statistics import Estimate
from eval.summary import Pair, Row, Section

HEADINGS = (
    "policy", "budget", "score", "95 % interval", "n", "cache", "peak", "KV footprint",
    "prefill", "compress", "decode", "tok/s",
)  # fmt: skip
_TERMINAL = (0, 1, 2, 3, 4, 5, 6, 7, 11)  # columns that fit into a window
NOTES = (
    "score: mean; a failed answer is 0. Intervals are 95 %: Wilson's where every score is 0 or 1, "
    "or all are equal, else a bootstrap; of a mean of tasks, a bootstrap that resamples within "
    "each task, to which a task with equal scores adds no width. Samples that share a context are "
    "resampled together.\n"
    "bold or *: the best evicting policy; ≈: its difference to the best on the same samples is not "
    "significant, the interval (paired bootstrap, 95 %, not corrected for the number of "
    "comparisons) covers 0, or there are too few samples for a verdict: fewer than 5 contexts in a "
    "task, or fewer than 6 on which the two differ; –: not run, or a task of the mean is missing.\n"
    "cache: sum of the sizes of one row's arrays, room for question and answer included; "
    "peak: with the full cache of the shared prefill.\n"
    "KV footprint: entries alive times tokens read or written, per KV head, relative to the full "
    "cache: (sum_{t=1..T} t + sum_{n=1..N} (kept + n)) / (sum_{t=1..T} t + sum_{n=1..N} (T + n)), "
    "T tokens of the prompt, N of question and answer. The shared prefill holds the whole prompt, "
    "so that it is in both; ≤: the policy evicts during its prefill or while decoding as well, "
    "which is not counted.\n"
    "prefill, compress, decode: seconds of the batch a sample ran in, without compilation; tok/s: "
    "decode steps per second, all policies of one budget side by side.\n"
    "A policy that as published evicts while decoding is compressed once, after the shared "
    "prefill, unless its options ask for decode_interval; prefill=chunked has a prefill of its "
    "own, which evicts chunk by chunk in bounded memory and is in its compress seconds."
)
_LISTED = 5  # ids of failed samples by error; results.json has all


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of HEADINGS."""
    failed = f" ({row.failures} failed)" if row.failures else ""
    score, costs = row.score, row.costs
    if score is None:
        return (row.policy, budget_label(row.budget), *"–" * (len(HEADINGS) - 2))
    return (
        row.policy,
        budget_label(row.budget),
        f"{score.mean:.2f}",
        f"{score.low:.2f} – {score.high:.2f}",
        f"{score.n}{_about(score)}{failed}",
        size(costs.cache_bytes),
        size(costs.peak_bytes),
        _shown(costs.footprint, lambda x: f"{'≤ ' if row.bounded else ''}{x:.3f}"),
        seconds(costs.prefill_seconds),
        seconds(costs.compress_seconds),
        seconds(costs.decode_seconds),
        _shown(costs.tokens_per_second, lambda x: f"{x:.1f}"),
    )


def _about(score: Estimate) -> str:
    """Of how many contexts the samples are, where several share one."""
    return "" if score.contexts == score.n else f" of {score.contexts} contexts"


def family_table(family: Family, part: Part, budget: str) -> list[list[tuple[str, str]]]:
    """Subsets down, policies across, as (text, kind) with kind "best", "like" (the best) or "".

    The first line holds the policies, the last one the mean with its interval.
    """
    names = [r.policy for r in family.means if r.budget in ("full", budget)]
    several = len({section.haystack for section in family.sections}) > 1
    kinds = ("haystack",) if several else ()
    lines = [[(name, "") for name in ("task", *kinds, "n", *names)]]
    for section in family.sections:
        rows = [r for r in part.rows[section] if r.budget in ("full", budget)]
        counts = sorted({r.score.n for r in rows if r.score})
        shown = [section.task.partition("/")[2], *((section.haystack,) if several else ())]
        shown.append("–".join(map(str, (counts[0], counts[-1])[: len(counts)])) if counts else "–")
        lines.append(
            [(text, "") for text in shown]
            + [(_shown(r.score, lambda x: f"{x.mean:.2f}"), part.verdict(r)) for r in rows]
        )
    means = [r for r in family.means if r.budget in ("full", budget)]
    total = max((r.score.n for r in means if r.score), default=None)
    last = [f"mean of {len(family.sections)} tasks", *(("",) if several else ())]
    last.append("–" if total is None else str(total))
    lines.append(
        [(text, "") for text in last]
        + [(_shown(r.score, lambda x: f"{x.mean:.3f}"), part.verdict(r)) for r in means]
    )
    lines.append(
        [("95 % interval", ""), *([("", "")] * (len(last) - 1))]
        + [(_shown(r.score, lambda x: f"{x.low:.3f} – {x.high:.3f}"), "") for r in means]
    )
    return lines


def text(results: Results | Sequence[Results]) -> str:
    """Aligned columns, a title per table; the tasks of a family in one table per budget."""
    parts = parts_module.parts(results)
    found = []
    for part in parts:
        if len(parts) > 1:
            found.append(part.title)
        for family in part.families:
            for budget in budgets(family.means):
                title = f"{heading(family.task, family.haystack, family.length)}, "
                lines = [
                    [mark(shown, kind) for shown, kind in line]
                    for line in family_table(family, part, budget)
                ]
                found.append(f"{title}{budget_label(budget)}\n" + _aligned(lines, 1))
        for title, rows in _titled(part, part.alone):
            lines = [list(HEADINGS)]
            for row in rows:
                shown = list(cells(row))
                shown[2] = mark(shown[2], part.verdict(row))
                lines.append(shown)
            lines = [[line[i] for i in _TERMINAL] for line in lines]
            found.append(f"{title}\n" + _aligned(lines, 2))
        for task, reason in part.results.absent:
            found.append(f"{task}: absent, {reason}")
    return "\n\n".join(found)


def budgets(rows: Sequence[Row]) -> list[str]:
    """In the order of the rows; "full" only where there is no other."""
    found = list(dict.fromkeys(row.budget for row in rows))
    return [budget for budget in found if budget != "full"] or found


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


def seconds(count: float | None) -> str:
    """0.012 s, 1.23 s, 45.6 s."""
    if count is None:
        return "–"
    digits = 3 if count < 1 else 2 if count < 10 else 1
    return f"{count:.{digits}f} s"


def mark(shown: str, kind: str, best: str = "{}*", like: str = "{}≈", plain: str = "{} ") -> str:
    """`shown` in the format for what `Part.verdict` says of it; by default for a terminal."""
    return {"best": best, "like": like}.get(kind, plain).format(shown)


def set_up(results: Results) -> dict[str, str]:
    """Versions, config, end tokens and the share of time spent outside the model."""
    facts = {k: str(v) for k, v in results.environment.items() if v is not None}
    found = {"config": results.config.hash} | facts
    found["end tokens"] = ", ".join(str(t) for t in results.prompt.get("end_tokens", ()))
    found["tokenised"] = str(results.prompt.get("tokenised", ""))
    if results.overhead is not None:
        found["outside the model"] = f"{100 * results.overhead:.1f} % of the time"
    return found


def template_text(results: Results) -> str:
    """The prompt with places for its parts."""
    template = results.prompt.get("template", {})
    before, after = (template.get(key, "") for key in ("before_user", "after_user"))
    return f"{before}⟨context⟩\n⟨question⟩{after}⟨answer prefix⟩"


def failure_lines(results: Results) -> list[tuple[str, str, str, str]]:
    """Policy, budget, error and samples of what failed, those of one error together."""
    found = []
    for (error, policy, budget), ids in parts_module.failures(results).items():
        more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
        found.append((policy, budget_label(budget), error, ", ".join(ids[:_LISTED]) + more))
    return found


def difference_cells(pair: Pair) -> tuple[str, ...]:
    """One comparison, in the order of DIFFERENCE_HEADINGS."""
    d = pair.difference
    mean, low, high = (round(x, 3) + 0.0 for x in (d.mean, d.low, d.high))  # no "-0.000"
    return (
        heading(pair.task, pair.haystack, pair.length),
        budget_label(pair.budget),
        pair.first,
        pair.second,
        f"{mean:+.3f}",
        f"{low:+.3f} – {high:+.3f}",
        str(d.n),
        "" if d.significant else "not significant" if d.enough else "too few",
    )


DIFFERENCE_HEADINGS = ("task", "budget", "policy", "other", "difference", "interval", "n", "")


def differences(part: Part) -> list[tuple[str, list[Pair]]]:
    """Titled lists of comparisons that are not empty."""
    both = [
        ("Differences to the full cache", part.against_full),
        ("Differences of the best policy to the others", part.comparisons),
    ]
    return [(title, pairs) for title, pairs in both if pairs]


def _titled(part: Part, sections: Sequence[Section]) -> list[tuple[str, list[Row]]]:
    return [(heading(s.task, s.haystack, s.length), part.rows[s]) for s in sections]


def _aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _shown[T](value: T | None, show: Callable[[T], str]) -> str:
    return "–" if value is None else show(value)
