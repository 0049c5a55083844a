"""The attention on a passage, before and after eviction: its figure, its numbers, its lines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float

from kvjax.inspection_figures import View, escaped, hues, swatch

_FULL = "full cache"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dilution:
    """What a question's tokens attend to: `masses` of the full cache, then of each view's."""

    question: str
    useful: Bool[np.ndarray, " T"]  # the tokens of the passage
    masses: tuple[Float[np.ndarray, "L H"], ...]  # of `dilution.useful_mass`

    def means(self) -> list[float]:
        """Percent of the attention that falls on the passage, over all layers and heads."""
        return [100 * float(mass.mean()) for mass in self.masses]

    def kept(self, view: View) -> float:
        """Percent of the passage's entries that the view holds."""
        return 100 * float(view.kept[:, :, self.useful].mean())

    def card(self, index: int, view: View) -> dict[str, str]:
        """Rows for the card of view `index`."""
        full, *evicted = self.means()
        return {
            "attention on the passage": f"{evicted[index]:.1f} %",
            "with the full cache": f"{full:.1f} %",
            "passage's entries kept": f"{self.kept(view):.0f} %",
        }

    def lines(self, views: Sequence[View]) -> Iterator[str]:
        """One line for each cache."""
        full, *evicted = self.means()
        yield f"{_FULL}: {full:.1f} % of the attention on the passage"
        for view, mean in zip(views, evicted, strict=True):
            kept = f"{self.kept(view):.0f} % of the passage's entries kept"
            yield f"{view.name}: {mean:.1f} %, {kept}"


def by_layer(dilution: Dilution, views: Sequence[View]) -> str:
    """The mean mass of a layer's query heads, a line for each cache."""
    names, colours = [_FULL, *(view.name for view in views)], ["whole", *hues(views)]
    curves = [100 * mass.mean(axis=1) for mass in dilution.masses]
    layers = len(curves[0])
    limit = _round_up(max(float(curve.max()) for curve in curves))
    width, height, left, top = 520, 150, 44, 8
    step = width / max(1, layers - 1)
    parts = []
    for level in (0.0, 0.5, 1.0):
        y = top + height * (1 - level)
        parts.append(f'<line class=axis x1={left} x2={left + width} y1="{y}" y2="{y}"/>')
        label = f"{limit * level:g} %"
        parts.append(f'<text x={left - 6} y="{y + 3}" text-anchor=end>{label}</text>')
    for name, hue, curve in zip(names, colours, curves, strict=True):
        places = [
            (left + step * layer, top + height * (1 - value / limit))
            for layer, value in enumerate(curve.tolist())
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line {hue}" points="{points}"/>')
        for layer, ((x, y), value) in enumerate(zip(places, curve.tolist(), strict=True)):
            note = f"layer {layer}, {escaped(name)}: {value:.1f} %"
            parts.append(
                f'<circle class="dot {hue}" data-i="{note}" cx="{x:.1f}" cy="{y:.1f}" r=3>'
                f"<title>{note}</title></circle>"
            )
    for layer in range(0, layers, max(1, -(-layers // 10))):
        x = left + step * layer
        parts.append(f'<text x="{x:.0f}" y={top + height + 16} text-anchor=middle>{layer}</text>')
    keys = "".join(
        f"<span>{swatch(hue)}{escaped(name)}</span>"
        for name, hue in zip(names, colours, strict=True)
    )
    return (
        f"<p class=note>Asked: {escaped(dilution.question)}<br>Of the attention of the question's "
        f"tokens, the share that falls on the {int(dilution.useful.sum()):,} tokens of the "
        "passage: by layer, the mean of its query heads. The rest falls on other tokens of the "
        "prompt and on the question itself.</p>"
        f"<p class=legend>{keys}</p><div class=card>"
        f'<svg class=profile viewBox="0 0 {left + width + 8} {top + height + 24}" role=img '
        f'aria-label="attention on the passage by layer">{"".join(parts)}</svg></div>'
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... (also below 1), for the end of an axis."""
    unit = 10.0 ** math.floor(math.log10(max(value, 1e-3)))
    return next(factor * unit for factor in (1, 2, 5, 10, 100) if factor * unit >= value)
