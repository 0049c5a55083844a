"""`kvjax inspect` writes a page, or one line that says why not."""

from __future__ import annotations

import pytest

from kvjax.models import orbax
from tests.models.small import random_model, small_tokenizer


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
