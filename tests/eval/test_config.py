"""A config says what is wrong with it in one line."""

from __future__ import annotations

import copy

import pytest
import yaml

from eval import config

GOOD = {
    "model": "smollm2-135m-instruct",
    "tasks": [
        {"name": "needle", "haystacks": ["noise"], "lengths": [500], "depths": [0, 1], "samples": 2}
    ],
    "policies": ["full", {"snapkv": {"window": 16}}],
    "budgets": [0.5, 128, "bytes: 1000000", {"bytes": 5}],
}


def changed(**changes):
    content = copy.deepcopy(GOOD)
    task = {k[5:]: v for k, v in changes.items() if k.startswith("task_")}
    content["tasks"][0] |= task
    return content | {k: v for k, v in changes.items() if not k.startswith("task_")}


def test_a_good_config_is_read_with_its_defaults():
    read = config.from_mapping(GOOD)
    assert read.budgets == (0.5, 128, "bytes: 1000000", "bytes: 5")
    assert [p.label for p in read.policies] == ["full", "snapkv(window=16)"]
    assert (read.question, read.seed, read.max_new_tokens) == ("hidden", 0, None)
    assert config.from_mapping(read.mapping) == read


BAD = [
    ([], r"the file=\[\]: allowed: a mapping"),
    ({"model": "x"}, "missing key 'tasks'"),
    (changed(polices=["full"]), "unknown key 'polices'.*did you mean 'policies'"),
    (changed(task_lenghts=[3]), r"unknown key 'lenghts' in tasks\[0\].*did you mean 'lengths'"),
    (changed(model=3), "model=3: allowed: a text"),
    (changed(model=" "), "model=' '"),
    (changed(tasks=[]), "tasks=.*at least one"),
    (changed(tasks="needle"), "tasks='needle'.*a list"),
    (changed(tasks=["needle"]), r"tasks\[0\]='needle'.*a mapping"),
    (changed(task_name="needl"), r"tasks\[0\].name='needl'.*did you mean 'needle'"),
    (changed(task_haystacks=["nois"]), r"haystacks\[0\]='nois'.*did you mean 'noise'"),
    (changed(task_haystacks=["file:"]), r"haystacks\[0\]='file:'"),
    (changed(task_haystack="noise"), "'haystacks' in tasks.0. is given twice"),
    (changed(task_lengths=[0]), r"lengths\[0\]=0: allowed: integers >= 1"),
    (changed(task_lengths=None), r"tasks\[0\].lengths=None: allowed: a list"),
    (changed(task_depths=None), r"tasks\[0\].depths=None: allowed: a list"),
    (changed(task_haystacks=None), r"tasks\[0\].haystacks=None: allowed: a list"),
    (changed(task_lengths=[500.0]), r"lengths\[0\]=500.0"),
    (changed(task_lengths=[True]), r"lengths\[0\]=True"),
    (changed(task_lengths=[500, 500]), "500 is given twice"),
    (changed(task_depths=[1.5]), r"depths\[0\]=1.5: allowed: numbers in \[0, 1\]"),
    (changed(task_depths=[float("nan")]), r"depths\[0\]=nan"),
    (changed(task_samples=0), "samples=0"),
    (changed(task_subsets=["vt"]), r"tasks\[0\].subsets: task needle does not take it"),
    (changed(task_max_length=9), r"tasks\[0\].max_length: task needle does not take it"),
    (changed(task_name="longbench"), r"tasks\[0\].haystacks: task longbench does not take it"),
    (changed(tasks=[{"name": "longbench"}]), r"missing key 'path' in tasks\[0\]: task longbench"),
    (
        changed(tasks=[{"name": "ruler", "subset": "nia", "lengths": [9], "samples": 1}]),
        r"tasks\[0\].subsets\[0\]='nia'",
    ),
    (changed(policies=[{"a": {}, "b": {}}]), r"policies\[0\]="),
    (changed(policies=[{"snapkv": {"window": [1]}}]), r"policies\[0\].snapkv.window=\[1\]"),
    (changed(policies=[{"snapkv": {1: 2, "a": 3}}]), r"policies\[0\].snapkv=1: allowed: options"),
    (changed(policies=["knorm", "knorm"]), "'knorm' is given twice"),
    (changed(budgets=[0]), r"budgets\[0\]=0: allowed: tokens"),
    (changed(budgets=[-3]), r"budgets\[0\]=-3"),
    (changed(budgets=[1.5]), r"budgets\[0\]=1.5: .*a fraction in \(0, 1\]"),
    (changed(budgets=[0.0]), r"budgets\[0\]=0.0"),
    (changed(budgets=[float("nan")]), r"budgets\[0\]=nan"),
    (changed(budgets=["bytes: 0"]), r"budgets\[0\]='bytes: 0'"),
    (changed(budgets=["lots"]), r"budgets\[0\]='lots'"),
    (changed(budgets=[True]), r"budgets\[0\]=True"),
    (changed(budgets=0.5), "budgets=0.5: allowed: a list"),
    (changed(question="shown"), "question='shown': allowed: hidden, seen"),
    (changed(max_new_tokens=0), "max_new_tokens=0: allowed: integers >= 1"),
    (changed(seed=-1), "seed=-1"),
    (changed(output=""), "output=''"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_is_named_in_one_line(content, message):
    with pytest.raises(ValueError, match=message) as error:
        config.from_mapping(content)
    assert "\n" not in str(error.value)


def test_files_that_are_no_yaml_are_named(tmp_path):
    path = tmp_path / "run.yaml"
    with pytest.raises(ValueError, match=r"run\.yaml.*No such file"):
        config.load(path)
    path.write_text("model: [a\nb: }")
    with pytest.raises(ValueError, match=r"run\.yaml' at line 2"):
        config.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        config.load(path)


def test_several_models_get_a_directory_each(tmp_path):
    path = tmp_path / "run.yaml"
    content = {key: value for key, value in GOOD.items() if key != "model"}
    path.write_text(yaml.safe_dump({**content, "models": ["a/b", "c"], "output": "runs/x"}))
    configs = config.load_all(path)
    assert [(c.model, c.output) for c in configs] == [("a/b", "runs/x/a--b"), ("c", "runs/x/c")]
    with pytest.raises(ValueError, match="has 2 models"):
        config.load(path)
    path.write_text(yaml.safe_dump({**GOOD, "models": ["a"]}))
    with pytest.raises(ValueError, match="'model' and 'models' are both given"):
        config.load(path)


def test_one_model_from_the_command_line_has_the_directory_that_is_its_own(tmp_path):
    path = tmp_path / "run.yaml"
    content = {key: value for key, value in GOOD.items() if key != "model"}
    path.write_text(yaml.safe_dump({**content, "models": ["a/x", "b/y"], "output": "runs/two"}))
    for model, output in (("b/y", "runs/two/b--y"), ("c/z", "runs/two/c--z")):
        (read,) = config.load_all(path, model)
        assert (read.model, read.output) == (model, output)
    path.write_text(yaml.safe_dump({**GOOD, "output": "runs/one"}))
    (read,) = config.load_all(path, "c/z")
    assert (read.model, read.output) == ("c/z", "runs/one")


def test_models_that_would_share_a_directory_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    content = {key: value for key, value in GOOD.items() if key != "model"}
    path.write_text(yaml.safe_dump({**content, "models": ["a/b", "a--b"], "output": "x"}))
    with pytest.raises(ValueError, match=r"the models' directories: 'x/a--b' is given twice"):
        config.load_all(path)


def test_an_output_may_begin_with_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert config.from_mapping(changed(output="~/runs/x")).output == "/home/ada/runs/x"


def test_the_hash_changes_with_what_changes_a_score():
    base = config.from_mapping(GOOD).hash
    assert config.from_mapping(changed(task_samples=9, output="elsewhere")).hash == base
    for change in ({"seed": 1}, {"budgets": [0.5]}, {"question": "seen"}, {"task_depths": [0]}):
        assert config.from_mapping(changed(**change)).hash != base


def test_the_demo_config_is_good():
    demo = config.load("configs/demo.yaml")
    assert {p.name for p in demo.policies} >= {"full", "snapkv", "h2o", "streaming"}
    assert demo.question == "hidden"
