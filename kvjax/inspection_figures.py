"""What a policy kept, and its figures over positions, layers and heads."""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from kvjax.cache import Cache, nbytes
from kvjax.cache.entries import kept_mask

_BINS = 160  # of the profile over positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """What one policy kept of a prompt."""

    name: str
    kept: Bool[np.ndarray, "L K T"]
    nbytes: int  # of the cache, measured

    @classmethod
    def of(cls, name: str, cache: Cache, length: int, row: int = 0) -> View:
        return cls(name=name, kept=kept_mask(cache, length, row), nbytes=nbytes(cache))

    @property
    def pairs(self) -> int:
        """(layer, KV head) pairs."""
        return self.kept.shape[0] * self.kept.shape[1]

    @property
    def counts(self) -> Int[np.ndarray, " T"]:
        return self.kept.sum(axis=(0, 1))

    @property
    def entries(self) -> int:
        return int(self.kept.sum())


def profile(views: Sequence[View]) -> str:
    """The mean share of pairs that keep a position, over bins of positions."""
    length = views[0].kept.shape[2]
    edges = np.linspace(0, length, min(_BINS, length) + 1).astype(int)
    width, height, left, top = 520, 130, 40, 8
    parts = []
    for level in (0.0, 0.5, 1.0):
        y = top + height * (1 - level)
        parts.append(f'<line class=axis x1={left} x2={left + width} y1="{y}" y2="{y}"/>')
        parts.append(f'<text x={left - 6} y="{y + 3}" text-anchor=end>{100 * level:.0f} %</text>')
    for view, hue in zip(views, hues(views), strict=True):
        share = view.counts / view.pairs
        points = []
        for a, b in itertools.pairwise(edges.tolist()):
            y = top + height * (1 - share[a:b].mean())
            points += [f"{left + width * x / length:.1f},{y:.1f}" for x in (a, b)]
        if len(views) == 1:
            base = top + height
            parts.append(
                f'<polygon class=area points="{left},{base} {" ".join(points)} '
                f'{left + width},{base}"/>'
            )
        parts.append(f'<polyline class="line {hue}" points="{" ".join(points)}"/>')
    for tick in np.linspace(0, length, 5).astype(int).tolist():
        x = left + width * tick / length
        anchor = "end" if tick == length else "middle"
        parts.append(
            f'<text x="{x:.0f}" y={top + height + 16} text-anchor={anchor}>{tick:,}</text>'
        )
    keys = "".join(
        f"<span>{swatch(hue)}{escaped(v.name)}</span>"
        for v, hue in zip(views, hues(views), strict=True)
    )
    return (
        "<p class=note>Share of pairs that keep a position, from the first token to the last.</p>"
        f"<p class=legend>{keys}</p><div class=card>"
        f'<svg class=profile viewBox="0 0 {left + width + 4} {top + height + 24}" role=img '
        f'aria-label="share kept by position">{"".join(parts)}</svg></div>'
    )


def maps(views: Sequence[View]) -> str:
    largest = max(int(view.kept.sum(axis=2).max()) for view in views)
    panels = [
        f"<div class=card><h3>{escaped(view.name)}</h3>{_map(view, hue, largest)}</div>"
        for view, hue in zip(views, hues(views), strict=True)
    ]
    note = (
        f"Entries kept by each KV head (rows) of each layer (columns); full colour is {largest:,}."
    )
    return f"<p class=note>{note}</p><div class=columns>{''.join(panels)}</div>"


def _map(view: View, hue: str, largest: int) -> str:
    entries = view.kept.sum(axis=2)  # [L, K]
    layers, heads = entries.shape
    cell, tall, left = 20, 26, 24
    parts = []
    for (layer, head), count in np.ndenumerate(entries):
        note = f"layer {layer}, head {head}: {int(count):,} entries"
        parts.append(
            f'<rect class=cell data-i="{note}" x={left + cell * layer} y={tall * head} '
            f'width={cell} height={tall} fill="var(--{_colour(hue)})" '
            f'fill-opacity="{count / largest:.2f}"><title>{note}</title></rect>'
        )
    parts += [
        f'<text x={left - 6} y="{tall * (head + 0.62):.0f}" text-anchor=end>{head}</text>'
        for head in range(heads)
    ]
    step = max(1, -(-layers // 8))
    for layer in range(0, layers, step):
        x = left + cell * (layer + 0.5)
        parts.append(f'<text x="{x:.0f}" y={tall * heads + 13} text-anchor=middle>{layer}</text>')
    low, high = int(entries.min()), int(entries.max())
    spread = f"every head keeps {low:,}" if low == high else f"{low:,} to {high:,} per head"
    return (
        f'<svg viewBox="0 0 {left + cell * layers + 2} {tall * heads + 18}" role=img '
        f'aria-label="entries by layer and head">{"".join(parts)}</svg>'
        f"<p class=note>{spread}, {int(entries.sum()):,} in all</p>"
    )


def hues(views: Sequence[View]) -> tuple[str, ...]:
    return ("one", "two") if len(views) == 2 else ("solo",)


def _colour(hue: str) -> str:
    return "heat-line" if hue == "solo" else f"{hue}-line"


def swatch(hue: str) -> str:
    return f'<span class=swatch style="background:var(--{_colour(hue)})"></span>'


def escaped(text: str) -> str:
    return html.escape(text, quote=True)
