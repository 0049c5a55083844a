"""Samples are evaluation's, with their answer, at seeds that evaluation never uses."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest

from eval import haystacks
from eval.prompt import Prompter
from eval.tasks import TASKS
from eval.tasks.base import Request
from tests.train.data.tokens import StableTokenizer
from train import data
from train.data import task as task_module
from train.data.answers import answer_text
from train.data.config import TaskConfig
from train.data.task import FIRST_SEED, TaskSource

ROW = 4096
TOKENIZER = StableTokenizer()


def source(task="ruler", lengths=(400, 500), most=ROW, tokenizer=TOKENIZER, **options):
    return TaskSource(TaskConfig(task=task, lengths=lengths, **options), tokenizer, most)


CASES = [
    *(("ruler", s, (500, 600)) for s in TASKS["ruler"].subsets if s.startswith("niah")),
    ("ruler", "vt", (1200, 1300)),
    ("ruler", "cwe", (1000, 1100)),
    ("ruler", "fwe", (600, 700)),
    ("needle", "", (300, 400)),
]


@pytest.mark.parametrize(("task", "subset", "lengths"), CASES)
def test_the_prompt_is_evaluations_and_the_answer_is_predicted(task, subset, lengths):
    made = source(task, lengths, subsets=(subset,) if subset else ())
    prompter = Prompter(TOKENIZER)
    for index in range(3):
        sample, example = made.sample(index), made[index]
        prompt = prompter.prompt(sample)
        prompt = prompt.prefill + prompt.question
        assert example["tokens"][: len(prompt)].tolist() == prompt
        assert lengths[0] * 0.97 <= len(prompt) <= lengths[1] * 1.01
        assert example["targets"].tolist() == [
            i >= len(prompt) for i in range(len(example["tokens"]))
        ]
        answer = TOKENIZER.decode(example["tokens"][len(prompt) :])
        assert answer == answer_text(sample) + "<|im_end|>"
        assert TASKS[task].score(sample, answer) == 1
        assert sample.seed >= FIRST_SEED == 10**9


def test_answers_are_written_as_the_task_suggests():
    single = source(subsets=("niah_single_2",)).sample(0)
    assert re.fullmatch(r" \d{7}\.", answer_text(single))

    values = source(subsets=("niah_multivalue",)).sample(0)
    order = [m[0] for m in re.finditer(r"\d{7}", values.context)]
    assert answer_text(values) == " {}, {}, {}, and {}.".format(*order)

    query = source(subsets=("niah_multiquery",)).sample(0)
    asked = re.search(r"numbers for (.*) mentioned", query.question)[1].replace("and ", "")
    found = [
        re.search(rf"magic numbers for {key} is: (\d+)\.", query.context)[1]
        for key in asked.split(", ")
    ]
    assert answer_text(query) == " {}, {}, {}, and {}.".format(*found)

    # The prompt of these two has a solved example: what follows the answer prefix there.
    chain = source(subsets=("vt",), lengths=(1200, 1300)).sample(0)
    solved = re.search(r"they are: ( .*)\n", chain.context)[1]
    assert re.fullmatch(r"( [A-Z]{3}){5}", solved)
    assert re.fullmatch(r"( [A-Z]{5}){5}", answer_text(chain))
    common = source(subsets=("cwe",), lengths=(1000, 1100)).sample(0)
    pattern = "".join(rf" {i}\. [a-z]+" for i in range(1, 11))
    assert re.search(rf"in the list are:{pattern}\n", common.context)
    assert re.fullmatch(pattern, answer_text(common))


def test_keys_are_needles_of_which_one_is_asked_for():
    made = source("needle", keys=7, haystacks=("sentences",))
    asked_first = 0
    for index in range(8):
        sample = made.sample(index)
        needles = re.findall(r"magic numbers for (\S+) is: (\d+)\.", sample.context)
        key = re.search(r"magic number for (\S+) mentioned", sample.question)[1]
        assert len(dict(needles)) == 7
        assert sample.answers == (dict(needles)[key],)
        asked_first += needles[0][0] == key
    assert asked_first < 8
    one = source("needle").sample(0)
    assert one.context.count("One of the special magic numbers") == 1


def test_subsets_haystacks_lengths_and_depths_vary():
    made = source(subsets=("niah_single_2", "niah_multikey_2"), haystacks=("sentences", "prose"))
    samples = [made.sample(i) for i in range(60)]
    subsets = [s.task.rpartition("/")[2] for s in samples]
    assert 15 < subsets.count("niah_single_2") < 45
    assert {s.haystack for s in samples} == {"sentences", "prose", "needles"}
    assert len({s.length for s in samples}) > 30
    assert all(400 <= s.length <= 500 for s in samples)
    early = source("needle", depths=(0.0, 0.1))
    assert all(0 <= early.sample(i).depth <= 0.1 for i in range(10))
    depths = [source("needle").sample(i).depth for i in range(20)]
    assert min(depths) < 0.3
    assert max(depths) > 0.7


def test_all_of_a_sample_is_predicted_where_asked():
    assert source("needle", labels="all")[0]["targets"].all()


def test_a_users_file_is_a_haystack(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. It does so again.\n\n" * 30)
    sample = source("needle", haystacks=(f"file:{path}",)).sample(0)
    assert "quick brown fox" in sample.context
    with pytest.raises(ValueError, match=r"haystack file .*none.txt.*: No such file"):
        source("needle", haystacks=("file:none.txt",))


def test_questions_of_a_file_are_asked(tmp_path):
    path = tmp_path / "squad.json"
    paragraphs = [
        {
            "context": f"Town {i} was founded by person {i} long before all others. " * 4,
            "qas": [{"question": f"Who founded town {i}?", "answers": [{"text": f"person {i}"}]}],
        }
        for i in range(40)
    ]
    path.write_text(json.dumps({"data": [{"title": "Towns", "paragraphs": paragraphs}]}))
    sample = source(subsets=("qa_1",), path=str(path)).sample(2)
    town = re.search(r"founded town (\d+)", sample.question)[1]
    assert answer_text(sample) == f" person {town}"


def evaluated(config: TaskConfig):
    """The contexts that evaluation makes with the seeds 0 to 50."""
    task = TASKS[config.task]
    count = Prompter(TOKENIZER).count
    for subset in config.subsets or ("",):
        kinds = config.haystacks if task.haystacks(subset) else (None,)
        depths = (0.0, 0.5, 1.0) if task.depths else (None,)
        for kind, depth, seed in itertools.product(kinds, depths, range(51)):
            request = Request(
                subset=subset,
                haystack=kind and haystacks.load(kind),
                length=config.lengths[0],
                depth=depth,
                seed=seed,
                count_tokens=count,
            )
            try:
                yield task.make(request).context
            except ValueError as error:
                # A sample that evaluation cannot make at this seed: the marks of noise are long.
                assert "met within 2 %" in str(error)


@pytest.mark.parametrize(
    "config",
    [
        TaskConfig(task="needle", lengths=(300, 300), haystacks=("noise", "prose")),
        TaskConfig(
            task="ruler",
            lengths=(300, 300),
            subsets=("niah_single_2", "niah_multikey_2", "fwe"),
            haystacks=("sentences",),
        ),
    ],
)
def test_no_context_is_one_that_evaluation_asks_about(config):
    made = TaskSource(config, TOKENIZER, ROW)
    trained = [made.sample(i).context for i in range(200)]
    assert len(set(trained)) == len(trained)
    asked = set(evaluated(config))
    assert len(asked) > 100
    assert not set(trained) & asked


def test_what_cannot_be_made_is_drawn_again_with_a_seed_of_its_own(monkeypatch):
    made, seeds = source("needle"), []
    plain = made._make

    def failing(kind, length, depth, seed):
        seeds.append(seed)
        if len(seeds) < 4:
            raise ValueError("length: too short to be met within 2 %")
        return plain(kind, length, depth, seed)

    monkeypatch.setattr(made, "_make", failing)
    assert made.sample(5).seed == seeds[3]
    assert seeds == [FIRST_SEED + 5 + attempt * task_module.SAMPLES for attempt in range(4)]
    assert min(seeds) >= FIRST_SEED

    def never(kind, length, depth, seed):
        raise ValueError("haystack prose: contains the key")

    monkeypatch.setattr(made, "_make", never)
    with pytest.raises(ValueError, match=r"sample 5 was not made in 16 draws: haystack prose"):
        made.sample(5)


def test_prompts_leave_their_answers_room():
    made = source(subsets=("niah_multivalue",), lengths=(400, 512), most=512)
    lengths = [len(made[i]["tokens"]) for i in range(30)]
    assert max(lengths) <= 512
    assert max(lengths) > 490


def test_lengths_that_cannot_be_are_refused_in_one_line():
    for options, message in (
        ({"lengths": (400, 600), "most": 512}, r"lengths=\[400, 600\]: rows have 512 tokens"),
        ({"lengths": (508, 512), "most": 512}, r"the answers of needle have 9 tokens and rows"),
        ({"lengths": (20, 300)}, r"lengths=\[20, 300\]: length=20: too short for task needle"),
        (
            {"task": "ruler", "subsets": ("niah_single_2", "vt"), "lengths": (256, 512)},
            r"lengths=\[256, 512\]: length=256: too short for ruler/vt; allowed are lengths >=",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            source(**{"task": "needle"} | options)
        assert "\n" not in str(caught.value)


def test_the_same_index_is_the_same_sample_and_identity_tells_configs_apart():
    first, second = source("needle"), source("needle", weight=3.0)
    assert first[7]["tokens"].tolist() == second[7]["tokens"].tolist()
    assert first.identity == second.identity
    config = TaskConfig(task="needle", lengths=(400, 500))
    for change in ({"keys": 2}, {"labels": "all"}, {"haystacks": ("noise",)}):
        other = TaskSource(dataclasses.replace(config, **change), TOKENIZER, ROW)
        assert other.identity != first.identity


def test_the_default_model_answers_in_its_own_tokens(default_model):
    tokenizer = default_model.tokenizer
    config = TaskConfig(task="needle", lengths=(200, 250), haystacks=("sentences",))
    made = data.open_source(config, tokenizer, 256)
    sample, example = made.sample(0), made[0]
    prompt = Prompter(tokenizer, "seen").prompt(sample).prefill
    assert example["tokens"][: len(prompt)].tolist() == prompt
    answer = example["tokens"][example["targets"]].tolist()
    assert tokenizer.decode(answer, False) == f" {sample.answers[0]}.<|im_end|>"
