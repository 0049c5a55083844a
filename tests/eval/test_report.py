"""The report shows everything, loads nothing, and believes no text."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from eval import harness, page, plots, records, report, summary, tables
from tests.eval.fakes import FakeEngine, small_config

NASTY = "<script>alert(1)</script>\"'&<img src=x onerror=y>"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    engine = FakeEngine(labels=("full", "first", "last", "broken"))
    config = small_config(policies=["first", "last", "broken"])
    return harness.run(config, engine, output=tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def nasty(results):
    """The same run with markup in every text that a prompt, a model or an error can bring."""

    def spoiled(sample):
        found = tuple(
            dataclasses.replace(r, answer=NASTY, error=r.error and NASTY, policy=r.policy + "<b>")
            if r.policy != "full"
            else r
            for r in sample.records
        )
        return dataclasses.replace(
            sample,
            id=sample.id + NASTY,
            haystack=f"file:{NASTY}",
            question=NASTY,
            excerpt=NASTY + sample.excerpt,
            answers=(NASTY,),
            metadata={"needle": NASTY},
            records=found,
        )

    prompt = {**results.prompt, "template": {"before_user": NASTY, "after_user": NASTY}}
    config = dataclasses.replace(results.config, model=NASTY)
    return dataclasses.replace(
        results,
        samples=tuple(spoiled(s) for s in results.samples),
        prompt=prompt,
        config=config,
        environment={NASTY: NASTY},
    )


class Tags(HTMLParser):
    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open, self.wrong = set(), set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def parsed(text):
    tags = Tags()
    tags.feed(text)
    return tags


def test_text_of_prompts_and_models_is_escaped(nasty):
    text = page.html(nasty)
    tags = parsed(text)
    assert not tags.tags & {"script", "img", "link", "iframe", "object"}
    assert not any(name.startswith("on") for name in tags.attributes)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "<script" not in tables.markdown(nasty)


def test_html_is_well_formed(results, nasty):
    for run in (results, nasty):
        tags = parsed(page.html(run))
        assert tags.wrong == [] and tags.open == []


def test_html_loads_nothing(results):
    text = page.html(results)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|\bsrc=", text)
    assert set(re.findall(r'href="(.)', text)) <= {"#"}


def test_ids_of_the_figures_do_not_clash(results):
    first, second = (
        plots.score_against_bytes(results, "needle", haystack) for haystack in ("noise", "prose")
    )
    shared = set(re.findall(r'<path id="(\w+)"', first)) & set(
        re.findall(r'<path id="(\w+)"', second)
    )
    assert not shared


def test_haystacks_are_reported_apart(results):
    rows = summary.rows(results)
    assert {r.haystack for r in rows} == {"noise", "prose"}
    assert all(r.score.n == 12 for r in rows)
    for row in rows:
        scores = [
            r.score
            for s in results.samples
            if s.haystack == row.haystack
            for r in s.records
            if (r.policy, r.budget) == (row.policy, row.budget)
        ]
        assert row.score.mean == pytest.approx(sum(scores) / 12)


def test_failures_stay_in_the_mean_and_are_listed(results):
    broken = [r for r in summary.rows(results) if r.policy == "broken"]
    assert all((r.failures, r.score.mean, r.cache_bytes) == (12, 0, None) for r in broken)
    text = page.html(results)
    assert "48 answers failed" in text and "scores are not finite" in text
    assert "48 answers failed" in tables.markdown(results)


def test_differences_are_paired_and_to_the_best(results):
    for c in summary.comparisons(results):
        mean = {
            r.policy: r.score.mean
            for r in summary.rows(results)
            if (r.haystack, r.budget) == (c.haystack, c.budget)
        }
        assert mean[c.best] == max(mean.values())
        assert c.difference.mean == pytest.approx(mean[c.best] - mean[c.other])
    assert "not significant" in page.html(results)


def test_files_are_complete_and_nothing_else_is_left(results, tmp_path):
    report.write(results, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", "results.md", "report.html"}
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["config"]["model"] == "fake"
    assert content["prompt"]["template"]["after_user"].startswith("<|im_end|>")
    assert len(content["samples"]) == 24 and len(content["summaries"]) == 14
    assert {"mean", "low", "high", "n", "method"} == set(content["summaries"][0]["score"])


def test_a_file_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("old")

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(type(path), "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        records.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_table_has_a_line_for_every_policy_and_budget(results):
    text = tables.text(results)
    assert len(text.split("\n")) == 2 * (2 + 7) + 1
    assert "25 %" in text and "12 (12 failed)" in text


def test_worst_samples_are_those_the_full_cache_answers(results):
    worst = summary.worst(results)
    assert {s.haystack for s in worst} == {"noise", "prose"}
    assert all(s.records[0].score == 1 for s in worst)


def test_sizes_and_budgets_read_well():
    assert [tables.size(x) for x in (None, 12, 1500, 2.5e6, 3e9)] == [
        "–",
        "12 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
    ]
    labels = [tables.budget_label(b) for b in ("full", "0.125", "128", "bytes: 2000000")]
    assert labels == ["full", "12.5 %", "128 tokens", "2.0 MB"]
