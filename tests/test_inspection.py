"""The page shows what the cache holds, escapes everything and loads nothing."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import kvjax
from kvjax.inspection import budget_map, kept_counts, render_page
from kvjax.inspection_dilution import Dilution
from kvjax.inspection_figures import View
from kvjax.passages import token_texts
from tests.models.small import random_model, small_tokenizer

LENGTH = 40
PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 260, LENGTH)]
HOSTILE = ["<script>alert(1)</script>", "\n", "\t", "", "é", "\"'&", "</div>"]


def cache(policy: str = "knorm", **options: object):
    return kvjax.prefill(random_model(), [PROMPT], policy=policy, budget=10, **options)[1]


def view(name: str = "one", seed: int = 0, length: int = len(HOSTILE)) -> View:
    kept = np.random.default_rng(seed).random((3, 2, length)) < 0.5
    return View(name=name, kept=kept, nbytes=1234)


def page(
    *views: View, texts: list[str] = HOSTILE, model: str = "a model", **options: object
) -> str:
    return render_page(
        texts, views, model=model, budget="10 entries", full_nbytes=99_999, **options
    )


def dilution(caches: int, layers: int = 3) -> Dilution:
    rng = np.random.default_rng(caches)
    masses = tuple(rng.uniform(0, 0.2, (layers, 4)).astype(np.float32) for _ in range(caches))
    return Dilution(question="<b>Who?", useful=np.arange(len(HOSTILE)) < 2, masses=masses)


@pytest.mark.parametrize("pages", [None, 4])
def test_counts_and_map_are_those_of_the_cache(pages):
    kept = cache(pages=pages)
    counts, entries = kept_counts(kept, LENGTH), budget_map(kept)
    assert counts.shape == (LENGTH,)
    assert entries.shape == (3, 2)
    assert counts.sum() == entries.sum() == int(kept.lengths.sum())
    if pages is None:
        positions = np.asarray(kept.positions)
        expected = [int((positions == place).sum()) for place in range(LENGTH)]
        np.testing.assert_array_equal(counts, expected)
    else:
        np.testing.assert_array_equal(counts, kept_counts(cache(), LENGTH))


def test_the_full_cache_keeps_every_token_everywhere():
    kept = cache("full")
    assert (kept_counts(kept, LENGTH) == 6).all()
    assert (budget_map(kept) == LENGTH).all()


def test_rows_are_told_apart():
    other = PROMPT[::-1][:25]
    _, kept = kvjax.prefill(random_model(), [PROMPT, other], policy="knorm", budget=10)
    positions = np.asarray(kept.positions)[:, 1]
    expected = [int((positions == place).sum()) for place in range(25)]
    np.testing.assert_array_equal(kept_counts(kept, 25, row=1), expected)
    np.testing.assert_array_equal(budget_map(kept, row=1), kept.lengths[:, 1])


def test_the_texts_of_the_tokens_join_to_the_prompt():
    tokenizer = small_tokenizer()
    text = "hello wörld, 日本 <|im_start|>x"
    texts = token_texts(tokenizer, tokenizer.encode(text))
    assert "".join(texts) == text
    assert "" in texts  # inside 日


class Parser(HTMLParser):
    """Collects tags and what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tokens: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.scripts += tag == "script"
        self.references += [given[name] for name in ("src", "href") if given.get(name)]
        if tag == "i":
            self.tokens.append(given)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("views", [(view(),), (view(), view("two", 1))])
def test_the_page_is_whole_and_loads_nothing(views):
    parser = Parser()
    written = page(*views)
    parser.feed(written)
    assert parser.open == []
    assert parser.references == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(", written)
    assert "default-src 'none'" in written
    panels = 1 if len(views) == 1 else 3
    assert len(parser.tokens) == panels * len(HOSTILE)


def test_foreign_text_is_escaped():
    evil = "<img src=x onerror=alert(1)>\"'"
    written = page(view(evil), view("two", 1), model=evil)
    parser = Parser()
    parser.feed(written)
    assert parser.scripts == 1
    assert "<img" not in written
    assert html.escape(HOSTILE[0]) in written
    assert not any("onerror" in token for token in parser.tokens)


def test_each_token_says_its_position_and_count():
    only = view()
    parser = Parser()
    parser.feed(page(only))
    for position, (token, count) in enumerate(zip(parser.tokens, only.counts, strict=True)):
        assert f"at {position}: kept by {count} of 6 pairs" in token["title"]
        assert token["style"] == f"--v:{100 * count / 6:.0f}"
        assert (token.get("class") == "n") == (count == 0)


def test_the_difference_takes_the_side_of_whoever_keeps_more():
    one, two = view("left"), view("right", 1)
    parser = Parser()
    parser.feed(page(one, two))
    widest = np.abs(one.counts - two.counts).max()
    for token, a, b in zip(parser.tokens, one.counts, two.counts, strict=False):
        assert f"left {a}, right {b} of 6 pairs" in token["title"]
        assert token["style"] == f"--v:{100 * abs(a - b) / widest:.0f}"
        if a != b:
            assert token["class"] == ("a" if a > b else "b")


def test_totals_are_in_the_page():
    one, two = view(), view("two", 1)
    written = page(one, two)
    both = int((one.kept & two.kept).sum())
    assert f"<dt>kept by both</dt><dd>{both}</dd>" in written
    assert f"<dd>{one.entries} of {one.kept.size}</dd>" in written
    assert "1.2 KiB of 97.7 KiB" in written


@pytest.mark.parametrize("layers", [1, 3, 30])
def test_the_attention_on_a_passage_is_a_line_for_each_cache(layers):
    views = (view("<i>one"), view("two", 1))
    shown = dilution(3, layers)
    written = page(*views, dilution=shown)
    parser = Parser()
    parser.feed(written)
    assert parser.open == []
    assert "<b>" not in written and "<i>one" not in written
    section = written.split("<h2>Attention on the passage</h2>")[1]
    assert section.count("<polyline") == 3
    for name, mass in zip(("full cache", "&lt;i&gt;one", "two"), shown.masses, strict=True):
        for layer, share in enumerate(mass.mean(axis=1)):
            assert f'"layer {layer}, {name}: {100 * share:.1f} %"' in section
    kept = 100 * views[0].kept[:, :, :2].mean()
    assert f"passage&#x27;s entries kept</dt><dd>{kept:.0f} %" in written
    assert f"with the full cache</dt><dd>{100 * shown.masses[0].mean():.1f} %" in written
    with pytest.raises(ValueError, match="dilution of 2 caches"):
        page(*views, dilution=dilution(2))


def test_views_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 views"):
        page(view(), view(), view())
    with pytest.raises(ValueError, match="0 views"):
        page()
    with pytest.raises(ValueError, match="view of 7 tokens for 2 texts"):
        page(view(), texts=["a", "b"])
