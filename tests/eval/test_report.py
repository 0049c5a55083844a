"""The report shows everything, loads nothing, and believes no text."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from html.parser import HTMLParser
from statistics import fmean

import pytest

from eval import (
    config,
    durable,
    harness,
    markdown,
    page,
    page_samples,
    planning,
    report,
    summary,
    tables,
)
from eval import parts as parts_module
from eval.statistics import paired_difference, stratified_mean
from tests.eval import handmade
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
            cut_tokens=1,
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
        absent=((NASTY, NASTY),),
    )


@pytest.fixture(scope="module")
def ruler():
    return handmade.family(subsets=("vt", "cwe", "fwe"), policies=3, n=7)


def html(*results):
    return page.html(parts_module.parts(results))


def md(*results):
    return markdown.markdown(parts_module.parts(results))


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
    text = html(nasty)
    tags = parsed(text)
    assert not tags.tags & {"script", "img", "link", "iframe", "object"}
    assert not any(name.startswith("on") for name in tags.attributes)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "<script" not in md(nasty)


def test_html_is_well_formed(results, nasty, ruler):
    for runs in ([results], [nasty], [results, nasty], [ruler]):
        tags = parsed(html(*runs))
        assert tags.wrong == [] and tags.open == []


def test_html_loads_nothing(results, ruler):
    text = html(results, ruler)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|\bsrc=", text)
    assert set(re.findall(r'href="(.)', text)) <= {"#"}


def test_ids_of_the_figures_do_not_clash(results, ruler):
    figures = re.findall(r"<svg(?! class=strip).*?</svg>", html(results, ruler), re.DOTALL)
    seen = set()
    for figure in figures:
        mine = set(re.findall(r' id="(\w+)"', figure))
        assert not mine & seen
        seen |= mine
    assert len(figures) == 8  # a curve per haystack and length, two maps, a family and its tasks


def test_haystacks_and_lengths_are_reported_apart(results):
    rows = summary.rows(results)
    assert {(r.haystack, r.length) for r in rows} == {
        (haystack, length) for haystack in ("noise", "prose") for length in (200, 320)
    }
    assert all(r.score.n == 6 for r in rows)
    for row in rows:
        scores = [
            r.score
            for s in results.samples
            if (s.haystack, s.length) == (row.haystack, row.length)
            for r in s.records
            if (r.policy, r.budget) == (row.policy, row.budget)
        ]
        assert row.score.mean == pytest.approx(sum(scores) / 6)


def test_failures_stay_in_the_mean_and_are_listed(results):
    broken = [r for r in summary.rows(results) if r.policy == "broken"]
    assert all((r.failures, r.score.mean, r.costs.cache_bytes) == (6, 0, None) for r in broken)
    text = html(results)
    assert "48 answers failed" in text and "scores are not finite" in text
    assert "48 answers failed" in md(results)


def test_differences_are_paired_and_to_the_best(results):
    (part,) = parts_module.parts(results)
    assert part.comparisons
    for c in part.comparisons:
        mean = {
            r.policy: r.score.mean
            for r in summary.rows(results)
            if (r.haystack, r.length, r.budget) == (c.haystack, c.length, c.budget)
        }
        assert mean[c.first] == max(mean.values())
        assert c.difference.mean == pytest.approx(mean[c.first] - mean[c.second])
    assert "not significant" in html(results) and "not significant" in md(results)
    assert "-0.000" not in md(results)


def test_every_policy_is_compared_with_the_full_cache(results):
    (part,) = parts_module.parts(results)
    rows = {(r.haystack, r.length, r.policy, r.budget): r.score.mean for r in summary.rows(results)}
    assert len(part.against_full) == sum(budget != "full" for *_, budget in rows)
    for c in part.against_full:
        place = (c.haystack, c.length)
        gained = rows[*place, c.first, c.budget] - rows[*place, "full", "full"]
        assert c.second == "full" and c.difference.mean == pytest.approx(gained)
    assert "Differences to the full cache" in html(results)
    assert "Differences to the full cache" in md(results)


def test_every_two_policies_are_compared_on_the_same_samples(ruler):
    pairs = summary.pairwise(ruler)
    assert len(pairs) == 3 * 3 * 6  # sections, budgets, and two of the full cache and 3 policies
    for pair in pairs[:20]:
        mine = [s for s in ruler.samples if s.task == pair.task]
        first, second = (
            [
                r.score
                for s in mine
                for r in s.records
                if r.policy == name and r.budget in ("full", pair.budget)
            ]
            for name in (pair.first, pair.second)
        )
        assert pair.difference == paired_difference(first, second)


def test_policies_that_ran_on_other_samples_are_compared_on_those_both_have():
    samples = []
    for number in range(6):
        there = [("a", 1.0), ("b", float(number > 2))] if number else [("a", 0.0)]
        records_ = [handmade.record("full")] + [
            handmade.record(name, "0.25", score) for name, score in there
        ]
        samples.append(handmade.sample("needle", number, records_))
    run = handmade.results(samples, policies=("a", "b"))
    (pair,) = [p for p in summary.pairwise(run) if {p.first, p.second} == {"a", "b"}]
    assert pair.difference == paired_difference([1.0] * 5, [0.0, 0.0, 1.0, 1.0, 1.0])
    rows = {r.policy: r.score for r in summary.rows(run)}
    assert (rows["a"].n, rows["b"].n) == (6, 5)


def footprint_by_counting(prompt, steps, kept):
    """Token by token: the entries alive while each is read or written."""

    def total(alive):
        entries = sum(range(1, prompt + 1))
        for _ in range(steps):
            alive += 1
            entries += alive
        return entries

    return total(kept) / total(prompt)


@pytest.mark.parametrize(
    ("prompt", "steps", "kept"), [(1, 1, 1), (100, 0, 5), (100, 40, 10), (37, 90, 12.5)]
)
def test_footprint_is_what_counting_gives(prompt, steps, kept):
    assert summary.footprint(prompt, steps, kept) == pytest.approx(
        footprint_by_counting(prompt, steps, kept)
    )
    assert summary.footprint(prompt, steps, prompt) == 1


def test_costs_are_means_over_samples_and_their_footprints():
    samples = [
        handmade.sample(
            "needle",
            n,
            [
                handmade.record("full", kept_tokens=50.0 + n),
                handmade.record("a", "0.25", kept_tokens=8.0 + n, generated_tokens=n),
                handmade.record("b", "0.25", 0.0, error="no", kept_tokens=0.0),
            ],
            prompt_tokens=50 + n,
            question_tokens=4,
            prefill_seconds=1.0 + n,
        )
        for n in range(3)
    ]
    full, a, b = summary.rows(handmade.results(samples, policies=("a", "b")))
    assert full.costs.footprint == 1
    counted = [footprint_by_counting(50 + n, 4 + n, 8.0 + n) for n in range(3)]
    assert a.costs.footprint == pytest.approx(fmean(counted))
    assert (a.costs.prefill_seconds, a.costs.kept_tokens) == (2.0, 9.0)
    assert b.costs == summary.Costs() and b.failures == 3


def test_a_footprint_is_a_bound_where_a_policy_evicts_elsewhere():
    policies = ["h2o", {"tova": {"decode_interval": 4}}, {"keydiff": {"prefill": "chunked"}}]
    labels = ["h2o", "tova(decode_interval=4)", "keydiff(prefill=chunked)"]
    sample = handmade.sample(
        "needle", 0, [handmade.record("full"), *(handmade.record(p, "0.25") for p in labels)]
    )
    text = tables.text(handmade.results([sample], policies=policies))
    assert [line for line in text.split("\n") if "≤" in line] == [
        line for line in text.split("\n") if "(" in line and "=" in line
    ]


def test_a_family_has_a_table_of_its_subsets_and_their_mean(ruler):
    (part,) = parts_module.parts(ruler)
    (family,) = part.families
    assert family.task == "ruler, mean of 3 tasks"
    for row in family.means:
        groups = [
            [
                r.score
                for s in ruler.samples
                if s.task == f"ruler/{subset}"
                for r in s.records
                if (r.policy, r.budget) == (row.policy, row.budget)
            ]
            for subset in ("vt", "cwe", "fwe")
        ]
        assert row.score.mean == pytest.approx(fmean(map(fmean, groups)))
        expected = stratified_mean(groups)
        assert (row.score.low, row.score.high) == (expected.low, expected.high)
    lines = tables.family_table(family, part, "0.25")
    assert [cell for cell, _ in lines[0]] == [
        "task", "n", "full", "policy0", "policy1", "policy2",
    ]  # fmt: skip
    assert [line[0][0] for line in lines[1:]] == [
        "vt", "cwe", "fwe", "mean of 3 tasks", "95 % interval",
    ]  # fmt: skip
    assert {line[1][0] for line in lines[1:4]} == {"7"} and lines[4][1][0] == "21"
    pairs = [p for p in part.pairs if p.task == family.task]
    assert len(pairs) == 3 * 6 and all(p.difference.n == 21 for p in pairs)


def test_the_best_evicting_policy_is_bold_and_what_is_like_it_marked():
    def run(scores):
        names = list(scores)
        samples = [
            handmade.sample(
                f"ruler/{subset}",
                n,
                [handmade.record("full", score=1.0)]
                + [handmade.record(name, "0.25", scores[name][n]) for name in names],
            )
            for subset in ("vt", "cwe")
            for n in range(10)
        ]
        return handmade.results(samples, policies=names)

    best, near, far = [1.0] * 9 + [0.0], [1.0] * 8 + [0.0] * 2, [0.0] * 10
    text = md(run({"good": best, "near": near, "far": far}))
    assert "| vt | 10 | 1.00 | **0.90** | 0.80 ≈ | 0.00 |" in text
    assert "| mean of 2 tasks | 20 | 1.000 | **0.900** | 0.800 ≈ | 0.000 |" in text
    assert "<b>0.90</b>" in html(run({"good": best, "near": near, "far": far}))
    # Where nothing scores, nothing is best; equals are both.
    assert "| vt | 10 | 1.00 | 0.00 | 0.00 |" in md(run({"a": far, "b": far}))
    assert "| vt | 10 | 1.00 | **0.80** | **0.80** |" in md(run({"a": near, "b": near}))


def test_haystacks_of_a_family_are_never_mixed():
    def subsets(*kinds_of):
        samples = [
            handmade.sample(f"ruler/{name}", 0, [handmade.record("full")], haystack=kind)
            for name, kinds in kinds_of
            for kind in kinds
        ]
        (part,) = parts_module.parts(handmade.results(samples))
        return {
            f.haystack: [(s.task.partition("/")[2], s.haystack) for s in f.sections]
            for f in part.families
        }

    defined = (("niah_single_1", ["noise"]), ("niah_single_2", ["prose"]), ("cwe", ["words"]))
    assert subsets(*defined) == {
        "as defined": [("niah_single_1", "noise"), ("niah_single_2", "prose"), ("cwe", "words")]
    }
    # Two haystacks for every subset that takes one: one with a text of its own is in both tables.
    both = ["noise", "prose"]
    assert subsets(("niah_single_1", both), ("vt", both), ("cwe", ["words"])) == {
        kind: [("niah_single_1", kind), ("vt", kind), ("cwe", "words")] for kind in both
    }
    # A haystack more for one of them takes nothing from the others' mean.
    more = (*defined, ("niah_single_1", ["sentences"]))
    assert subsets(*more) == subsets(*defined)
    assert subsets(("vt", ["noise"])) == {}


def test_a_family_keeps_lengths_apart_and_has_a_dash_for_what_is_missing():
    samples = [
        handmade.sample(
            f"ruler/{subset}",
            0,
            [handmade.record("full")]
            + [handmade.record("a", "0.25")] * (subset == "vt" or length == 8192),
            length=length,
        )
        for subset in ("vt", "cwe")
        for length in (8192, 4096)
    ]
    run = handmade.results(samples, policies=("a",))
    (part,) = parts_module.parts(run)
    assert [f.length for f in part.families] == [4096, 8192]
    short, long = ([r.score for r in f.means if r.policy == "a"] for f in part.families)
    assert short == [None] and long[0].mean == 1
    lines = tables.family_table(part.families[0], part, "0.25")
    assert [line[-1][0] for line in lines[1:]] == ["1.00", "–", "–", "–"]
    assert "Not every policy was run at every budget" in md(run)


def test_a_page_of_13_tasks_9_policies_and_3_budgets_takes_seconds(tmp_path):
    run = handmade.family(policies=8)
    start = time.process_time()
    report.write(run, tmp_path)
    assert time.process_time() - start < 15
    text = (tmp_path / "report.html").read_text()
    assert all(f"ruler/{name}" in text for name in handmade.RULER)
    assert len(text) < 2_000_000


def test_cut_contexts_absences_and_an_unfinished_run_are_said_first(results):
    assert "not finished" not in md(results)
    samples = tuple(dataclasses.replace(s, cut_tokens=n % 3) for n, s in enumerate(results.samples))
    run = dataclasses.replace(
        results, samples=samples[:12], absent=(("ruler/qa_1", "squad.json is not there"),)
    )
    for text in (html(run), md(run)):
        assert "not finished: 12 of 24 planned samples" in text
        assert (
            "needle: 8 of 12 contexts were longer than allowed; their middle was cut, 2 tokens at "
            "most" in text
        )
        assert "squad.json is not there" in text
        assert text.index("not finished") < text.index("needle in noise")
    assert "ruler/qa_1: absent, squad.json is not there" in tables.text(run)


@pytest.mark.parametrize(
    "tasks",
    [
        [{"name": "needle", "haystacks": ["noise", "prose"], "lengths": [300, 400],
          "depths": [0, 1], "samples": 3}],
        [{"name": "ruler", "lengths": [600], "samples": 2, "subsets": ["niah_single_1", "cwe"]},
         {"name": "needle", "haystacks": ["noise"], "lengths": [300], "depths": [0.5],
          "samples": 1}],
    ],
)  # fmt: skip
def test_the_number_of_planned_samples_is_the_plan_s(tasks):
    run = config.from_mapping(
        {"model": "m", "tasks": tasks, "policies": ["snapkv"], "budgets": [0.5]}
    )
    plan = planning.plan(run, lambda *texts: sum(len(text.split()) for text in texts))
    assert parts_module.planned(run, plan.absent) == len(plan.samples)


def test_time_outside_the_model_and_versions_are_told(results):
    run = dataclasses.replace(
        results,
        samples=tuple(
            dataclasses.replace(s, wall_seconds=4.0, model_seconds=3.0) for s in results.samples
        ),
    )
    for text in (html(run), md(run)):
        assert "25.0 % of the time" in text
        assert results.config.hash in text and "fake" in text
        assert "end tokens" in text


def test_long_answers_and_texts_are_shortened_on_the_page_only(results, tmp_path):
    def longer(sample):
        return dataclasses.replace(
            sample,
            question="why " * 1000,
            excerpt="text " * 5000,
            needle_tokens=(),
            metadata={},
            records=tuple(
                dataclasses.replace(r, answer="word " * 2000, kept_profile=())
                for r in sample.records
            ),
        )

    run = dataclasses.replace(results, samples=tuple(map(longer, results.samples)))
    text = html(run)
    assert "Worst samples" in text and "[…]" in text
    assert len(text) < 2 * len(html(results))
    report.write(run, tmp_path)
    (part,) = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert part["samples"][0]["records"][0]["answer"] == "word " * 2000


def test_every_needle_of_a_sample_is_marked():
    spans = ((0, 400), (2000, 2100))
    sample = handmade.sample("needle", 0, [handmade.record("full")], needle_tokens=spans)
    assert page_samples.sample(sample).count("<rect class=needle") == 2
    none = dataclasses.replace(sample, needle_tokens=(), excerpt="")
    assert "rect class=needle" not in page_samples.sample(none)
    assert "<blockquote>" not in page_samples.sample(none)


def test_depths_get_a_map_over_all_lengths_and_tasks_without_them_none(results, ruler):
    assert html(results).count("by depth of the needle") == 2
    assert "by depth of the needle" not in html(ruler)


def test_parts_are_titled_by_what_differs(results, ruler):
    other = dataclasses.replace(ruler.config, model=results.config.model, question="seen")
    text = html(results, dataclasses.replace(ruler, config=other))
    assert '<a href="#part-0">fake, question hidden' in text
    assert '<a href="#part-1">fake, question seen' in text


def test_files_are_complete_and_nothing_else_is_left(results, tmp_path):
    report.write(results, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", "results.md", "report.html"}
    content = json.loads((tmp_path / "results.json").read_text())
    (part,) = content["parts"]
    assert part["config"]["model"] == "fake"
    assert part["prompt"]["template"]["after_user"].startswith("<|im_end|>")
    assert len(part["samples"]) == 24 and len(part["summaries"]) == 4 * 7
    assert {"mean", "low", "high", "n", "contexts", "method"} == set(part["summaries"][0]["score"])
    assert len(part["pairs"]) == 4 * 2 * 6 and len(part["differences"]) == 4 * 2 * 2


def test_a_file_is_never_half_written(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("old")

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(type(path), "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        durable.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_table_has_a_line_for_every_policy_and_budget(results):
    text = tables.text(results)
    assert len(text.split("\n")) == 4 * (2 + 7) + 3
    assert "25 %" in text and "6 (6 failed)" in text


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
