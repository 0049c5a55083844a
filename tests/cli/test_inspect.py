"""`kvjax inspect` writes a page, or one line that says why not."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

import kvjax
from eval import haystacks
from kvjax.cli import generate, inspect
from kvjax.learned.modules import Card, fingerprints, save_module
from kvjax.learned.retention import GateConfig, init_gates
from kvjax.models import orbax
from tests import tiny
from tests.models.small import random_model, small_tokenizer


@pytest.fixture(autouse=True, scope="module")
def quick():
    with tiny.quick_compilation():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small"
    orbax.save(random_model(), small_tokenizer(), path)
    return path


def test_two_policies_on_one_page(run, folder, tmp_path):
    prompt = tmp_path / "p.txt"
    prompt.write_text("The <b>quick</b> brown fox jumps over the lazy dog.")
    page = tmp_path / "page.html"
    ran = run(
        *("inspect", "--model", folder, "--policy", "knorm", "--policy", "snapkv:window=4"),
        *("--budget", "25%", "--prompt-file", prompt, "--output", page),
    )
    assert (ran.status, ran.err) == (0, "")
    assert "knorm:" in ran.out
    assert str(page) in ran.out
    written = page.read_text()
    assert "snapkv" in written
    assert "<b>" not in written
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_the_attention_on_a_passage_gets_a_section_and_lines(run, folder, tmp_path):
    page = tmp_path / "page.html"
    arguments = (
        *("inspect", "--model", folder, "--policy", "knorm", "--policy", "full"),
        *("--budget", "25%", "--prompt", "The quick <brown> fox jumps over it.", "--output", page),
        *("--question", "Who <jumps>?", "--dilution", "<brown> fox"),
    )
    for more in ((), ("--raw", "--pages", "4")):
        ran = run(*arguments, *more)
        assert (ran.status, ran.err) == (0, "")
        full, knorm, same = ran.out.splitlines()[2:5]
        assert re.fullmatch(r"full cache: \d+\.\d % of the attention on the passage", full)
        assert re.fullmatch(r"knorm: \d+\.\d %, \d+ % of the passage's entries kept", knorm)
        assert same.startswith("full: ") and same.endswith(" 100 % of the passage's entries kept")
        assert full.split()[2] == same.split()[1]
        written = page.read_text()
        assert "<h2>Attention on the passage</h2>" in written
        assert written.count("<dt>attention on the passage</dt>") == 2
        assert "<dt>attention on the passage</dt><dd>" + knorm.split()[1] in written
        assert "Who &lt;jumps&gt;?" in written and "<brown>" not in written


def test_the_question_stands_where_generate_puts_it():
    tokenizer = small_tokenizer()
    for raw in (False, True):
        given = (tokenizer, "A text.", "Who?", raw)
        assert inspect._tokens(*given) == generate._tokens(*given)
        assert inspect._tokens(tokenizer, "A text.", None, raw) == (inspect._tokens(*given)[0], [])


def test_filters_are_calibrated_on_what_eval_shows_them():
    tokens = inspect._calibration(small_tokenizer())
    shown = small_tokenizer().decode(tokens)
    assert len(tokens) == 1024
    assert shown in "".join(haystacks.load("sentences").sentences)


def gates(path):
    config = GateConfig(width=4)
    arrays = init_gates(
        config, jax.random.key(0), num_layers=3, num_kv_heads=2, hidden_size=32, bias=3.0
    )
    model = random_model()
    card = Card(
        module="retention-global",
        kind="retention",
        options=dataclasses.asdict(config),
        backbone="small",
        fingerprints=fingerprints(model),
    )
    save_module(path, arrays, card)


@pytest.mark.parametrize("policy", ["restkv:window=4", "qfilters", "retention-global"])
def test_policies_get_the_arrays_they_bring_along(run, folder, tmp_path, monkeypatch, policy):
    if policy.startswith("retention"):
        gates(tmp_path / "gates")
        policy += f":path={tmp_path / 'gates'}"
    monkeypatch.setattr(inspect, "_calibration", lambda tokenizer: tokenizer.encode("brief"))
    seen, compress = [], kvjax.compress
    monkeypatch.setattr(
        kvjax,
        "compress",
        lambda *a, params, **b: seen.append(params) or compress(*a, params=params, **b),
    )
    ran = run(
        *("inspect", "--model", folder, "--policy", policy, "--budget", "25%"),
        *("--prompt", "The quick brown fox.", "--output", tmp_path / "page.html"),
    )
    assert (ran.status, ran.err) == (0, "")
    expected = kvjax.policy_params(
        random_model(), inspect._policy(policy), lambda: small_tokenizer().encode("brief")
    )
    assert expected is not None
    jax.tree.map(np.testing.assert_array_equal, seen, [expected])


REFUSED = {
    "no policy": (("--prompt", "x"), "--policy"),
    "no budget": (("--prompt", "x", "--policy", "knorm"), "--budget"),
    "unknown policy": (("--prompt", "x", "--policy", "norm", "--budget", "9"), "'norm'"),
    "unknown option": (
        ("--prompt", "x", "--policy", "snapkv:width=3", "--budget", "9"),
        "'width'",
    ),
    "option without a value": (
        ("--prompt", "x", "--policy", "snapkv:window", "--budget", "9"),
        "NAME=VALUE",
    ),
    "three policies": (
        ("--prompt", "x", *(3 * ("--policy", "knorm")), "--budget", "9"),
        "3 policies",
    ),
    "empty prompt": (("--prompt", " ", "--policy", "full"), "empty"),
    "missing file": (("--prompt-file", "nowhere.txt", "--policy", "full"), "nowhere.txt"),
    "dilution alone": (
        ("--prompt", "x", "--policy", "full", "--dilution", "x"),
        "--dilution without --question",
    ),
    "question alone": (
        ("--prompt", "x", "--policy", "full", "--question", "x"),
        "--question without --dilution",
    ),
    "empty question": (
        ("--prompt", "x", "--policy", "full", "--dilution", "x", "--question", " "),
        "--question: it is empty",
    ),
    "passage elsewhere": (
        ("--prompt", "x", "--policy", "full", "--dilution", "y", "--question", "y"),
        "'y': found 0 times in the prompt; allowed is",
    ),
    "nowhere to write": (
        ("--prompt", "x", "--policy", "full", "--output", "no/where.html"),
        "no/where.html",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_and_status_2(run, name):
    arguments, part = REFUSED[name]
    ran = run("inspect", *arguments)
    assert ran.status == 2
    assert ran.out == ""
    assert part in ran.err
    assert ran.err.count("\n") == 1
