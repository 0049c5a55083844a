"""Figures as inline SVG that takes its ink from the page, so that it fits light and dark."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eval import tables as tables_module
from eval.records import SampleResult
from eval.summary import Column, Row

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
_DEPTHS = 21  # rows of a heat map that stay legible


def available() -> bool:
    """Whether matplotlib, which draws, is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def figure_style(draw: Callable[..., Any]) -> Callable[..., str]:
    """Runs `draw(name, ...) -> figure` under this module's style; the figure as SVG.

    Ids within one page must differ between figures and agree between runs: `name` salts them.
    """

    @functools.wraps(draw)
    def drawn(name: str, *arguments: Any) -> str:
        import matplotlib as mpl

        style = {
            "svg.fonttype": "none",
            "text.parse_math": False,
            "svg.hashsalt": f"{draw.__name__} {name}",
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
            return _svg(draw(name, *arguments))

    return drawn


@figure_style
def score_against_bytes(name: str, rows: Sequence[Row]) -> Any:
    """Mean score over mean measured cache bytes, one line per policy, with 95 % intervals."""
    from matplotlib.figure import Figure

    legend = _legend(rows)
    figure = Figure(figsize=(_WIDTH, 3.4 + legend["height"]), layout="constrained")
    axes = figure.add_subplot()
    _curves(axes, rows)
    axes.set(xlabel="cache, MB measured", ylabel="score")
    _draw_legend(figure, axes, legend)
    return figure


@figure_style
def scores_of_tasks(name: str, tables: Mapping[str, Sequence[Row]]) -> Any:
    """`score_against_bytes` of many tasks by their names, small, under one legend."""
    from matplotlib.figure import Figure

    down = -(-len(tables) // 2)
    legend = _legend([row for rows in tables.values() for row in rows])
    size = (_WIDTH, 1.45 * down + 0.3 + legend["height"])
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(down, 2, sharey=True, squeeze=False)
    for axes, (title, rows) in zip(grid.flat, tables.items(), strict=False):
        _curves(axes, rows, small=True)
        axes.set_title(_short(title, 34), fontsize=8.5, loc="left", pad=3)
    for axes in grid.flat[len(tables) :]:
        axes.set_axis_off()
    figure.supxlabel("cache, MB measured", fontsize=9)
    figure.supylabel("score", fontsize=9)
    _draw_legend(figure, grid.flat[0], legend, "upper")
    return figure


@figure_style
def depth_by_length(name: str, samples: Sequence[SampleResult], columns: Sequence[Column]) -> Any:
    """Heat maps of mean score, depth against prompt length: policies down, budgets across."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    budgets = list(dict.fromkeys(b for p, b in columns if p != "full")) or ["full"]
    policies = list(dict.fromkeys(p for p, _ in columns))
    lengths = sorted({s.length for s in samples if s.length is not None})
    depths, row_of = _depth_rows([s.depth for s in samples if s.depth is not None])
    sums = {c: np.zeros((2, len(depths), len(lengths))) for c in columns}
    for s in samples:
        if s.depth is None or s.length is None:
            continue
        at = row_of[s.depth], lengths.index(s.length)
        for r in s.records:
            sums[r.policy, r.budget][:, *at] += (r.score, 1)
    figure = Figure(figsize=(_WIDTH, 0.72 * len(policies) + 0.8), layout="constrained")
    grid = figure.subplots(len(policies), len(budgets), squeeze=False)
    mesh, colours = None, mpl.colormaps["viridis"].resampled(41)
    for i, policy in enumerate(policies):
        for j, budget in enumerate(budgets):
            axes = grid[i][j]
            column = (policy, "full" if policy == "full" else budget)
            if (policy == "full" and j > 0) or column not in sums:
                axes.axis("off")
                continue
            total, count = sums[column]
            cells = np.where(count > 0, total / np.maximum(count, 1), np.nan)
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
                name = _short(policy, 34).replace("(", "\n(")
                axes.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=6, fontsize=8.5)
            if i == len(policies) - 1:
                names = [str(length) for length in lengths]
                crowded = len(budgets) * sum(map(len, names)) > 30
                turned = {"rotation": 90, "fontsize": 7.5} if crowded else {}
                axes.set_xticks([x + 0.5 for x in range(len(lengths))], names, **turned)
            if policy == "full":
                axes.set_title("full cache", fontsize=9)
            elif i == (1 if policies[0] == "full" else 0):
                axes.set_title(tables_module.budget_label(budget), fontsize=9)
    figure.supxlabel("prompt length, tokens", fontsize=9)
    if mesh is not None:
        bar = figure.colorbar(mesh, ax=grid, shrink=0.5, aspect=30, pad=0.02)
        if bar.solids is not None:
            bar.solids.set(rasterized=False, edgecolor="face")
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, length=0)
        bar.set_label("score", fontsize=9)
    return figure


def has_depths(samples: Sequence[SampleResult]) -> bool:
    """Whether a map by depth and length would show more than one cell."""
    cells = {(s.depth, s.length) for s in samples if s.depth is not None and s.length is not None}
    return len(cells) > 1


def _depth_rows(depths: Sequence[float]) -> tuple[list[float], dict[float, int]]:
    """Depths to show and the row of each; where seeds drew many of them, ten equal stretches."""
    found = sorted(set(depths))
    if len(found) <= _DEPTHS:
        return found, {depth: row for row, depth in enumerate(found)}
    return [row / 9 for row in range(10)], {d: min(9, int(10 * d)) for d in found}


def _curves(axes: Any, rows: Sequence[Row], small: bool = False) -> None:
    there = [r for r in rows if r.score is not None and r.costs.cache_bytes is not None]
    policies = list(dict.fromkeys(r.policy for r in rows if r.policy != "full"))
    widest = max((_megabytes(r) for r in there), default=1.0)
    width = 0.7 if small else 1.0
    for row in there:
        if row.policy == "full":
            axes.axhline(row.score.mean, color=_INK, lw=0.9 * width, ls=(0, (4, 3)), alpha=0.5)
            axes.errorbar(
                [_megabytes(row)],
                [row.score.mean],
                _error([row]),
                fmt="*",
                ms=12 * width,
                color=_INK,
                lw=width,
                label="full",
            )
    for index, policy in enumerate(policies):
        found = sorted((r for r in there if r.policy == policy), key=_megabytes)
        # Policies of one budget have equal bytes: a small step apart keeps the intervals legible.
        step = (index - (len(policies) - 1) / 2) * widest * 0.009
        axes.errorbar(
            [_megabytes(r) + step for r in found],
            [r.score.mean for r in found],
            _error(found),
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            ls="-" if index < len(_COLOURS) else "--",
            ms=3.2 if small else 5.5,
            lw=1.0 if small else 1.6,
            elinewidth=0.5 if small else 0.9,
            label=_short(policy, 52),
        )
    highest = max((r.score.high for r in there), default=1.0)
    # Scores that stay low, as those of summaries, would be a line at the bottom.
    top = 1.0 if highest > 0.6 or small else max(0.1, 1.15 * highest)
    axes.set(ylim=(-0.04 * top, 1.06 * top), xlim=(0, widest * 1.06))
    axes.grid(axis="y", lw=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    if small:
        axes.tick_params(labelsize=7.5)


def _legend(rows: Sequence[Row]) -> dict[str, Any]:
    """Columns that leave room for the longest name, and inches for the lines."""
    names = [_short(name, 52) for name in dict.fromkeys(row.policy for row in rows)]
    longest = max(map(len, names), default=1)
    across = 3 if longest <= 17 else 2 if longest <= 29 else 1
    return {"ncols": across, "height": 0.2 * -(-len(names) // across) + 0.1}


def _draw_legend(figure: Any, axes: Any, legend: Mapping[str, Any], place: str = "lower") -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc=f"outside {place} center",
        ncols=legend["ncols"],
        frameon=False,
        handlelength=1.6,
    )


def _megabytes(row: Row) -> float:
    return (row.costs.cache_bytes or 0) / 1e6


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


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
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # matplotlib's names, the same in every figure
    for stand_in, colour in _PAGE.items():
        svg = svg.replace(stand_in, colour)
    # The page's own font, at the sizes that were laid out.
    return re.sub(r"(font: ?[^;\"']*?px) [^;\"]*", r"\1 var(--sans)", svg)
