"""Figures as inline SVG that takes its ink from the page, so that it fits light and dark."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from statistics import fmean
from typing import Any

from eval import summary, tables
from eval.records import Results

# Stand-ins that `_svg` turns into the page's colours.
_INK, _LINE, _PAPER = "#010203", "#010204", "#010205"
_PAGE = {_INK: "currentColor", _LINE: "var(--line)", _PAPER: "var(--paper)"}
# Okabe and Ito's set, its black and yellow replaced: all readable on white and on near-black.
_COLOURS = (
    "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#8c8c1e", "#9b6dd6",
    "#a0522d", "#7f8c8d",
)  # fmt: skip
# Inches; a phone shows it at about its true size, so that 9 points stay readable there.
_WIDTH = 5.0
_MARKERS = "osD^vPXphd"


def available() -> bool:
    """Whether matplotlib, which draws, is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _figure(draw: Callable[..., Any]) -> Callable[..., str]:
    """Runs `draw(...) -> figure` under this module's style and returns the figure as SVG."""

    @functools.wraps(draw)
    def drawn(*arguments: Any) -> str:
        import matplotlib as mpl

        style = {
            "svg.fonttype": "none",
            "text.parse_math": False,
            # Ids within one page must differ between figures and agree between runs.
            "svg.hashsalt": f"{draw.__name__}{arguments[1:]}",
            "font.family": "sans-serif",
            "font.size": 9.5,
            "text.color": _INK,
            "axes.edgecolor": _LINE,
            "axes.labelcolor": _INK,
            "xtick.color": _LINE,
            "ytick.color": _LINE,
            "xtick.labelcolor": _INK,
            "ytick.labelcolor": _INK,
            "grid.color": _LINE,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
        with mpl.rc_context(style):
            return _svg(draw(*arguments))

    return drawn


@_figure
def score_against_bytes(results: Results, task: str, haystack: str) -> Any:
    """Mean score over mean measured cache bytes, one line per policy, with 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 4.1), layout="constrained")
    axes = figure.add_subplot()
    rows = [r for r in summary.rows(results) if (r.task, r.haystack) == (task, haystack)]
    policies = list(dict.fromkeys(r.policy for r in rows if r.policy != "full"))
    widest = max((r.cache_bytes or 0 for r in rows), default=1) / 1e6
    for row in rows:
        if row.policy == "full" and row.cache_bytes is not None:
            x, error = row.cache_bytes / 1e6, _error([row])
            axes.axhline(row.score.mean, color=_INK, lw=0.9, ls=(0, (4, 3)), alpha=0.5)
            axes.errorbar(
                [x], [row.score.mean], error, fmt="*", ms=12, color=_INK, lw=1, label="full"
            )
    for index, policy in enumerate(policies):
        found = [r for r in rows if r.policy == policy and r.cache_bytes is not None]
        found.sort(key=lambda r: r.cache_bytes or 0)
        # Policies of one budget have equal bytes: a small step apart keeps the intervals legible.
        step = (index - (len(policies) - 1) / 2) * widest * 0.009
        axes.errorbar(
            [(r.cache_bytes or 0) / 1e6 + step for r in found],
            [r.score.mean for r in found],
            _error(found),
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            ms=5.5,
            lw=1.6,
            elinewidth=0.9,
            label=policy,
        )
    axes.set(xlabel="cache, MB measured", ylabel="score", ylim=(-0.04, 1.06))
    axes.set_xlim(0, widest * 1.06)
    axes.grid(axis="y", lw=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=1.6)
    return figure


@_figure
def depth_by_length(results: Results, task: str, haystack: str) -> Any:
    """Heat maps of mean score, depth against prompt length: policies down, budgets across."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.figure import Figure

    columns = summary.columns(results)
    budgets = list(dict.fromkeys(b for p, b in columns if p != "full")) or ["full"]
    policies = list(dict.fromkeys(p for p, _ in columns))
    chosen = [s for s in results.samples if (s.task, s.haystack) == (task, haystack)]
    lengths = sorted({s.length for s in chosen})
    depths = sorted({s.depth for s in chosen})
    figure = Figure(figsize=(_WIDTH, 0.72 * len(policies) + 0.8), layout="constrained")
    grid = figure.subplots(len(policies), len(budgets), squeeze=False)
    mesh, colours = None, mpl.colormaps["viridis"].resampled(41)
    for i, policy in enumerate(policies):
        for j, budget in enumerate(budgets):
            axes = grid[i][j]
            key = (policy, "full" if policy == "full" else budget)
            if policy == "full" and j > 0:
                axes.axis("off")
                continue
            pairs = summary.select(results, task, haystack, *key)
            cells = np.full((len(depths), len(lengths)), np.nan)
            for y, depth in enumerate(depths):
                for x, length in enumerate(lengths):
                    here = [r.score for s, r in pairs if (s.depth, s.length) == (depth, length)]
                    cells[y, x] = fmean(here) if here else np.nan
            mesh = axes.pcolormesh(
                cells, vmin=0, vmax=1, cmap=colours, edgecolors=_PAPER, linewidth=1.2
            )
            axes.invert_yaxis()
            axes.tick_params(length=0, labelsize=8)
            axes.spines[:].set_visible(False)
            axes.set_xticks([])
            axes.set_yticks([])
            if j == 0:
                ends = [0.5, len(depths) - 0.5] if len(depths) > 1 else [0.5]
                axes.set_yticks(ends, [f"{depths[round(e - 0.5)]:g}" for e in ends])
                axes.set_ylabel(policy, rotation=0, ha="right", va="center", labelpad=6)
            if i == len(policies) - 1:
                axes.set_xticks([x + 0.5 for x in range(len(lengths))], [str(n) for n in lengths])
            if policy == "full":
                axes.set_title("full cache", fontsize=9)
            elif i == (1 if policies[0] == "full" else 0):
                axes.set_title(tables.budget_label(budget), fontsize=9)
    figure.supxlabel("prompt length, tokens", fontsize=9)
    if mesh is not None:
        bar = figure.colorbar(mesh, ax=grid, shrink=0.5, aspect=30, pad=0.02)
        if bar.solids is not None:
            bar.solids.set(rasterized=False, edgecolor="face")
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, length=0)
        bar.set_label("score", fontsize=9)
    return figure


def _error(rows: list[Any]) -> list[list[float]]:
    """Distances from the mean down and up, never below 0 by rounding."""
    return [
        [max(0.0, r.score.mean - r.score.low) for r in rows],
        [max(0.0, r.score.high - r.score.mean) for r in rows],
    ]


def _svg(figure: Any) -> str:
    """SVG for an HTML page: no prologue, metadata, name spaces or fixed size; page colours."""
    buffer = io.StringIO()
    blank = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=blank)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", svg)
    for stand_in, colour in _PAGE.items():
        svg = svg.replace(stand_in, colour)
    # The page's own font, at the sizes that were laid out.
    return re.sub(r"(font: ?[^;\"']*?px) [^;\"]*", r"\1 var(--sans)", svg)
