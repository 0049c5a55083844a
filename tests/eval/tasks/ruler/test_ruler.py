"""What all thirteen subsets have in common: lengths, seeds, haystacks, scores, refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys

import pytest

from eval.tasks import ruler
from tests.eval.tasks.ruler.conftest import LENGTHS, count_words

SUBSETS = ruler.TASK.subsets
BRING_THEIR_OWN = ("niah_multikey_2", "niah_multikey_3", "cwe", "fwe", "qa_1", "qa_2")


def test_there_are_the_thirteen_subsets_with_their_new_tokens(make):
    new = {subset: make(subset).max_new_tokens for subset in SUBSETS}
    needles = [name for name in SUBSETS if name.startswith("niah_")]
    assert len(SUBSETS) == 13 and len(needles) == 8
    assert new == dict.fromkeys(needles, 128) | {
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
        "qa_1": 32,
        "qa_2": 32,
    }


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("subset", SUBSETS)
def test_the_length_is_met_within_two_percent_and_never_exceeded(
    make, count_tokens, subset, length
):
    for seed in range(3):
        sample = make(subset, length, seed, count=count_tokens)
        tokens = count_tokens(sample.context, sample.question, sample.answer_prefix)
        assert 0.98 * length <= tokens <= length
        assert tokens == sample.metadata["tokens"] and sample.length == length


@pytest.mark.parametrize("subset", SUBSETS)
def test_other_haystacks_meet_the_length_too(make, subset):
    if subset in BRING_THEIR_OWN:
        return
    for haystack in ("noise", "sentences", "prose"):
        sample = make(subset, 1500, haystack=haystack)
        tokens = count_words(sample.context, sample.question, sample.answer_prefix)
        assert 0.98 * 1500 <= tokens <= 1500
        assert sample.haystack == haystack and sample.id == f"ruler/{subset}/{haystack}/1500/s0"
        assert len(sample.metadata["haystack_sha256"]) == 64


def test_subsets_that_bring_their_own_text_say_which():
    assert tuple(s for s in SUBSETS if not ruler.TASK.haystacks(s)) == BRING_THEIR_OWN
    assert ruler.TASK.haystacks("niah_single_1") == ruler.TASK.haystacks("vt") == ("noise",)
    assert ruler.TASK.haystacks("niah_multivalue") == ("prose",)


@pytest.mark.parametrize("subset", BRING_THEIR_OWN)
def test_a_haystack_changes_nothing_for_a_subset_with_text_of_its_own(make, subset):
    assert make(subset, haystack="noise") == make(subset)
    assert make(subset).haystack in ("needles", "words", "documents")


@pytest.mark.parametrize("subset", SUBSETS)
def test_seeds_give_different_samples_with_different_ids(make, subset):
    samples = [make(subset, seed=seed) for seed in range(4)]
    assert len({s.context for s in samples}) == len({s.id for s in samples}) == 4
    assert len({s.answers for s in samples}) == 4
    assert all(s.task == f"ruler/{subset}" and s.depth is None for s in samples)


@pytest.mark.parametrize("subset", SUBSETS)
def test_spans_hold_text_of_the_context(make, subset):
    sample = make(subset)
    spans = sample.metadata.get("needle_spans", [])
    assert bool(spans) == (subset not in ("cwe", "fwe"))
    assert spans == sorted(spans)
    for start, end in spans:
        text = sample.context[start:end]
        assert text.strip() and sample.context.count(text) == 1
    if spans:
        assert sample.metadata["needle_span"] == spans[0]


def test_a_fresh_process_makes_the_same_samples(make):
    program = """
import hashlib
from eval import haystacks
from eval.tasks import TASKS
from eval.tasks.base import Request
from tests.eval.tasks.ruler.conftest import count_words
task = TASKS["ruler"]
text = ""
for subset in task.subsets[:11]:
    kinds = task.haystacks(subset)
    text += repr(task.make(Request(
        subset=subset, haystack=haystacks.load(kinds[0]) if kinds else None, length=1024,
        depth=None, seed=5, count_tokens=count_words)))
print(hashlib.sha256(text.encode()).hexdigest())
"""
    text = "".join(repr(make(subset, seed=5)) for subset in SUBSETS[:11])
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("subset", SUBSETS)
def test_too_short_a_length_is_refused_with_the_least_that_is_allowed(make, subset):
    with pytest.raises(ValueError, match=rf"^length=20: too short for ruler/{subset}; .* >= \d+$"):
        make(subset, 20)


def test_what_does_not_fit_the_subset_is_refused(make):
    with pytest.raises(ValueError, match="subset='niah': allowed for task ruler are niah_single_1"):
        make("niah", haystack="noise")
    with pytest.raises(ValueError, match=r"depth=0.5 for ruler/cwe: allowed are none"):
        make("cwe", depth=0.5)
    with pytest.raises(ValueError, match=r"depth=2 for ruler/niah_single_1: .*\[0, 1\]"):
        make("niah_single_1", depth=2)
    request = ruler.Request(
        subset="vt", haystack=None, length=1024, depth=None, seed=0, count_tokens=count_words
    )
    with pytest.raises(ValueError, match="haystack=None: ruler/vt needs one, 'noise' say"):
        ruler.make(request)


def test_the_score_is_the_share_of_answers_and_for_questions_whether_there_is_one(make):
    sample = dataclasses.replace(make("niah_multivalue"), answers=("Red", "blue", "pink", "grey"))
    assert ruler.score(sample, "RED, then blue-green.") == 0.5
    assert ruler.score(sample, "") == 0
    question = dataclasses.replace(make("qa_1"), answers=("Red", "blue"))
    assert ruler.score(question, "it is BLUE") == 1
    assert ruler.score(question, "it is green") == 0
