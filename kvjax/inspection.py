"""A page that shows which tokens of a prompt a policy kept, and where two policies differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources

import numpy as np
from jaxtyping import Int

from kvjax.cache import Cache
from kvjax.cache.entries import kept_mask
from kvjax.inspection_dilution import Dilution, by_layer
from kvjax.inspection_figures import View, escaped, hues, maps, profile, swatch

_SCRIPT = """\
const out = document.querySelector('.readout');
let last = null;
function show(event) {
  const hit = event.target.closest('[data-i]');
  if (!hit) return;
  if (last) last.classList.remove('on');
  hit.classList.add('on');
  last = hit;
  out.textContent = hit.getAttribute('title') || hit.getAttribute('data-i');
}
document.addEventListener('pointerover', show);
document.addEventListener('click', show);
"""


def kept_counts(cache: Cache, length: int, row: int = 0) -> Int[np.ndarray, " T"]:
    """For each of the first `length` positions, how many (layer, KV head) pairs kept it."""
    return kept_mask(cache, length, row).sum(axis=(0, 1))


def budget_map(cache: Cache, row: int = 0) -> Int[np.ndarray, "L K"]:
    """Entries kept by each layer and KV head of one row."""
    return np.asarray(cache.lengths)[:, row]


def render_page(
    texts: Sequence[str],
    views: Sequence[View],
    *,
    model: str,
    budget: str,
    full_nbytes: int,
    dilution: Dilution | None = None,
) -> str:
    """One self-contained page: nothing is loaded and all foreign text is escaped.

    Args:
      texts: the text of each token of the prompt.
      views: one policy, or two to compare.
      model, budget: as the page should name them.
      full_nbytes: bytes of the cache that keeps everything.
      dilution: the attention on a passage, for a section of its own.

    Raises:
      ValueError: not one or two views, views of another number of tokens, or a dilution of
        other views.
    """
    if not 1 <= len(views) <= 2:
        raise ValueError(f"{len(views)} views: allowed are one, or two to compare")
    for view in views:
        if view.kept.shape[2] != len(texts):
            raise ValueError(f"view of {view.kept.shape[2]} tokens for {len(texts)} texts")
    if dilution is not None and len(dilution.masses) != 1 + len(views):
        raise ValueError(
            f"dilution of {len(dilution.masses)} caches: allowed is the full cache and then one "
            f"for each of {len(views)} views"
        )
    names = " and ".join(escaped(view.name) for view in views)
    title = f"What {names} keep{'s' if len(views) == 1 else ''} of {len(texts):,} tokens"
    style = resources.files("kvjax").joinpath("inspection.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    body = [
        f"<header><p class=kicker>kvjax inspect · {escaped(model)}</p><h1>{title}</h1>",
        f"<p class=lead>{_lead(views, budget)}</p>{_cards(texts, views, full_nbytes, dilution)}"
        "</header>",
        f"<section><h2>The prompt</h2>{_prompt(texts, views)}</section>",
        f"<section><h2>By position</h2>{profile(views)}</section>",
        f"<section><h2>By layer and head</h2>{maps(views)}</section>",
        "<footer>Bytes are the sum of the cache's array sizes.</footer>",
    ]
    if dilution is not None:
        section = f"<section><h2>Attention on the passage</h2>{by_layer(dilution, views)}</section>"
        body.insert(-1, section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title} · {escaped(model)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        "<main>\n" + "\n".join(body) + "\n</main>\n<div class=readout role=status></div>\n"
        f"<script>\n{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _lead(views: Sequence[View], budget: str) -> str:
    layers, heads, _ = views[0].kept.shape
    return (
        f"The model has {layers} layers of {heads} KV heads, and each of these {layers * heads} "
        f"pairs decides for itself. The budget is {escaped(budget)}. A token is shaded by how many "
        "pairs still hold it; point at it or tap it to see the number."
    )


def _cards(
    texts: Sequence[str], views: Sequence[View], full_nbytes: int, dilution: Dilution | None
) -> str:
    cards = []
    total = views[0].pairs * len(texts)
    for index, (view, hue) in enumerate(zip(views, hues(views), strict=True)):
        counts = view.counts
        rows = {
            "entries kept": f"{view.entries:,} of {total:,}",
            "share": f"{100 * view.entries / total:.1f} %",
            "cache": f"{_size(view.nbytes)} of {_size(full_nbytes)}",
            "tokens kept everywhere": f"{int((counts == view.pairs).sum()):,}",
            "tokens kept nowhere": f"{int((counts == 0).sum()):,}",
        }
        if dilution is not None:
            rows |= dilution.card(index, view)
        cards.append(_card(swatch(hue) + escaped(view.name), rows))
    if len(views) == 2:
        one, two = (view.kept for view in views)
        both = int((one & two).sum())
        either = int((one | two).sum())
        rows = {
            "kept by both": f"{both:,}",
            f"only {views[0].name}": f"{int((one & ~two).sum()):,}",
            f"only {views[1].name}": f"{int((two & ~one).sum()):,}",
            "in common": f"{100 * both / max(1, either):.1f} %",
        }
        cards.append(_card("Agreement, in entries", rows))
    return f"<div class=cards>{''.join(cards)}</div>"


def _card(heading: str, rows: dict[str, str]) -> str:
    lines = "".join(
        f"<div><dt>{escaped(k)}</dt><dd>{escaped(v)}</dd></div>" for k, v in rows.items()
    )
    return f"<div class=card><h3>{heading}</h3><dl>{lines}</dl></div>"


def _prompt(texts: Sequence[str], views: Sequence[View]) -> str:
    panels = []
    pairs = views[0].pairs
    for view in views:
        legend = (
            f"<p class=legend>kept by 0 <span class='ramp heat'></span> {pairs} of {pairs} pairs; "
            "grey text is gone</p>"
        )
        spans = (
            _token(text, position, 100 * count / pairs, "n" if count == 0 else "",
                   f"kept by {count} of {pairs} pairs")
            for position, (text, count) in enumerate(
                zip(texts, view.counts.tolist(), strict=True)
            )
        )  # fmt: skip
        panels.append(_panel(escaped(view.name), legend, spans))
    columns = f"<div class=columns>{''.join(panels)}</div>"
    if len(views) == 1:
        return columns
    return f"<div>{_difference(texts, views)}</div><br>{columns}"


def _difference(texts: Sequence[str], views: Sequence[View]) -> str:
    one, two = (view.counts for view in views)
    pairs = views[0].pairs
    widest = max(1, int(np.abs(one - two).max()))
    legend = (
        f"<p class=legend>{escaped(views[0].name)} keeps it more often "
        f"<span class='ramp versus'></span> {escaped(views[1].name)} does (up to {widest} pairs); "
        "grey text is gone from both</p>"
    )
    spans = []
    for position, (text, a, b) in enumerate(zip(texts, one.tolist(), two.tolist(), strict=True)):
        kind = "n" if a == b == 0 else "a" if a > b else "b"
        note = f"{views[0].name} {a}, {views[1].name} {b} of {pairs} pairs"
        spans.append(_token(text, position, 100 * abs(a - b) / widest, kind, note))
    return _panel("Difference", legend, spans)


def _panel(heading: str, legend: str, spans: Iterable[str]) -> str:
    return (
        f"<div class=card><h3>{heading}</h3>{legend}<div class=tokens>{''.join(spans)}</div></div>"
    )


def _token(text: str, position: int, percent: float, kind: str, note: str) -> str:
    if not text:
        shown = "<span class=mark>·</span>"
        named = "part of a character"
    else:
        shown = escaped(text).replace("\n", "<span class=mark>↵</span>\n").replace("\t", "\u21e5\t")
        named = escaped(repr(text))
    css = f" class={kind}" if kind else ""
    title = f"{named} at {position}: {escaped(note)}"
    return f'<i{css} style="--v:{percent:.0f}" data-i title="{title}">{shown}</i>'


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
