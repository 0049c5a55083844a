"""`kvjax inspect` writes a page, or one line that says why not."""

from __future__ import annotations

import re

import pytest

from kvjax.cli import generate
from kvjax.cli.options import tokens_of
from tests import tiny
from tests.models.small import small_tokenizer


@pytest.fixture(autouse=True, scope="module")
def quick():
    with tiny.quick_compilation():
        yield


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
        assert tokens_of(*given) == generate._tokens(*given)
        assert tokens_of(tokenizer, "A text.", None, raw) == (tokens_of(*given)[0], [])


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
