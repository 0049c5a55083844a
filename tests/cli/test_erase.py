"""`kvjax erase` asks before and after, and refuses passages it cannot find."""

from __future__ import annotations

import re

import jax
import pytest

import kvjax
from kvjax.learned.eraser import EraserConfig, init_eraser, save_eraser
from tests.cli.test_bad_input import assert_refused
from tests.models.small import BASE, random_model

TEXT = "Anna lives in Rome. The code is 7421, they say. Peter lives in Oslo and has a cat.\n"
ASK = ("--question", "What is the code?", "--max-new-tokens", 4)


@pytest.fixture
def erase(run, folder, tmp_path):
    def call(*arguments: object, text: str = TEXT):
        (tmp_path / "notes.txt").write_text(text, encoding="utf-8")
        given = ("--model", folder, "--context-file", tmp_path / "notes.txt", *ASK)
        return run("erase", *given, *arguments)

    return call


def lines(finished) -> dict[str, str]:
    assert finished.status == 0, finished.err
    assert finished.err == ""
    before, after, exact, time, full = finished.out.splitlines()
    assert re.fullmatch(r"full recomputation: \d+\.\d+ s, \d+\.\d times as long", full)
    found = dict(re.fullmatch(r"(\w+) +(.*)", line).groups() for line in (before, after, exact))
    return found | {"time": time}


def test_answers_before_and_after_and_the_time(erase):
    mask = lines(erase("--span", "The code is 7421, they say. ", "--method", "mask"))
    assert sorted(mask) == ["after", "before", "recomputed", "time"]
    erased, behind = map(int, re.search(r"for (\d+) tokens, (\d+) stand", mask["time"]).groups())
    assert mask["time"].startswith("mask: ")
    assert 20 <= erased <= 28 and behind >= 30  # a token for about each character
    exact = lines(erase("--span", "20:48", "--method", "recompute"))
    assert exact["after"] == exact["recomputed"] == mask["recomputed"]
    assert exact["before"] == mask["before"]
    assert f"for {erased} tokens" in exact["time"]


def test_a_trained_eraser_is_read_from_its_directory(erase, tmp_path):
    made = init_eraser(EraserConfig(rank=2), jax.random.key(0), BASE)
    save_eraser(tmp_path / "eraser", made, random_model(), backbone="small")
    found = lines(erase("--span", "7421", "--eraser", tmp_path / "eraser"))
    assert found["after"] == found["before"]  # untrained: nothing changes
    hybrid = erase("--span", "7421", "--eraser", tmp_path / "eraser", "--method", "hybrid")
    assert lines(hybrid)["time"].startswith("hybrid: ")


def test_a_note_is_given_as_text(erase):
    found = erase("--span", "7421", "--method", "note", "--option", "note= Ignore the code.")
    assert lines(found)["time"].startswith("note: ")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--span", "absent"), ("'absent'", "does not occur")),
        (("--span", "lives in"), ("occurs 2 times", "5:13", "54:62")),
        (("--span", " "), ("--span", "empty")),
        (("--span", "9:9"), ("9:9", "START < STOP <= 83")),
        (("--span", "9:84"), ("9:84", "83")),
        (("--span", "19:20"), ("white space",)),
        (("--span", "7421"), ("no weights of 'kveraser'", "ship for smollm2-135m-instruct")),
        (("--span", "7421", "--method", "forget"), ("'forget'", "kveraser", "recompute")),
        (("--span", "7421", "--method", "mask", "--option", "tokens"), ("NAME=VALUE",)),
        (("--span", "7421", "--method", "mask", "--option", "tokens=3"), ("'tokens'",)),
        (("--span", "7421", "--method", "mask", "--max-new-tokens", 0), ("0", ">= 1")),
        (("--span", "7421", "--method", "mask", "--question", " "), ("--question", "empty")),
        (("--span", "7421", "--method", "mask", "--max-new-tokens", 9000), ("context is 2048",)),
    ],
)
def test_what_cannot_be_erased_is_refused(erase, arguments, fragments):
    assert_refused(erase(*arguments), *fragments)


def test_a_context_that_is_missing(run, folder):
    finished = run("erase", "--model", folder, "--context-file", "nowhere", "--span", "x", *ASK)
    assert_refused(finished, "nowhere")


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_no_longer_tells_what_was_erased(
    run, tmp_path, monkeypatch, default_model
):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: default_model)
    (tmp_path / "notes.txt").write_text(TEXT)
    finished = run(
        *("erase", "--context-file", tmp_path / "notes.txt", "--question", "What is the code?"),
        *("--span", "The code is 7421, they say. ", "--method", "mask", "--max-new-tokens", 24),
    )
    found = lines(finished)
    assert "7421" in found["before"]
    assert "7421" not in found["after"]
