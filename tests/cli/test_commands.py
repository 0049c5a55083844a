"""What the commands print and write when all is well."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

import kvjax
from kvjax.cli import main as main_module

STORY = (
    "Anna lives in Rome and has a dog called Bello. Peter lives in Oslo and has a cat. "
    "Maria lives in Lima and plays the harp every evening."
)


def test_every_command_shows_an_example(run):
    for name in main_module.COMMANDS:
        finished = run(name, "--help")
        assert finished.status == 0
        assert f"example:\n  kvjax {name}" in finished.out


def test_help_lists_the_commands(run):
    finished = run("--help")
    assert all(name in finished.out for name in main_module.COMMANDS)


def test_help_does_not_wait_for_jax():
    code = (
        "import sys; sys.argv = ['kvjax', '--help']\n"
        "from kvjax.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version(run):
    assert re.fullmatch(r"kvjax \S.*\n", run("--version").out)


def test_an_interrupt_leaves_quietly(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_command", interrupted)
    finished = run("policies")
    assert (finished.status, finished.out, finished.err) == (130, "", "")


def test_a_reader_that_stops_early_is_no_error():
    code = "import sys; from kvjax.cli.main import main; sys.exit(main(['policies']))"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


def test_an_error_in_the_program_is_not_dressed_up(run, monkeypatch):
    def broken(*_):
        raise AssertionError("a bug")

    monkeypatch.setattr(main_module, "_command", broken)
    with pytest.raises(AssertionError):
        run("policies")


def test_policies_are_listed_with_their_options(run):
    finished = run("policies")
    assert finished.status == 0
    for name in kvjax.policy_names():
        assert re.search(rf"^{re.escape(name)} ", finished.out, re.MULTILINE)
    assert "window=32" in finished.out
    assert max(map(len, finished.out.splitlines())) <= 100


def test_one_policy_is_described_in_full(run):
    finished = run("policies", "snapkv")
    assert "arXiv 2404.14469" in finished.out
    assert "window=32" in finished.out
    assert "the last 32 tokens" in finished.out


@pytest.mark.parametrize("form", ["orbax", "hf"])
def test_a_converted_checkpoint_is_equal_to_the_bit(run, small_checkpoint, tmp_path, form):
    finished = run("convert", small_checkpoint, tmp_path / "out", "--format", form)
    assert finished.status == 0, finished.err
    assert str(tmp_path / "out") in finished.out
    before = kvjax.load(small_checkpoint).model
    after = kvjax.load(tmp_path / "out").model
    assert after.config == before.config
    for name, value in before.parameters.items():
        np.testing.assert_array_equal(after.parameters[name], value)


@pytest.mark.model
class TestGenerate:
    @pytest.fixture(autouse=True)
    def _loaded(self, default_model, monkeypatch):
        monkeypatch.setattr(kvjax, "load", lambda *_, **__: default_model)

    def test_the_answer_alone_goes_to_standard_output(self, run):
        finished = run(
            "generate", "--prompt", "What is the capital of France?", "--max-new-tokens", 16
        )
        assert finished.status == 0, finished.err
        assert finished.out == "The capital of France is Paris.\n"
        assert finished.err == ""

    def test_the_question_is_asked_of_what_stayed(self, run):
        finished = run(
            *("generate", "--prompt", STORY, "--question", "Where does Anna live?"),
            *("--policy", "knorm", "--budget", "50%", "--max-new-tokens", 8, "--stats"),
        )
        assert finished.status == 0, finished.err
        kept, seen = map(
            int, re.search(r"(\d+) entries.* after (\d+) tokens", finished.err).groups()
        )
        budget, prompt = map(int, re.search(r"budget (\d+) of (\d+)", finished.err).groups())
        assert budget == round(0.5 * prompt)
        assert kept - budget == seen - prompt  # question and answer are kept whole
        assert re.search(r"tokens/s", finished.err)

    def test_a_decode_interval_bounds_the_cache(self, run):
        finished = run(
            *("generate", "--prompt", STORY, "--policy", "streaming", "--budget", "16"),
            *("--decode-interval", 4, "--max-new-tokens", 24, "--stats"),
        )
        assert finished.status == 0, finished.err
        assert int(re.search(r"capacity (\d+)", finished.err)[1]) <= 16 + 4

    def test_sampling_follows_the_seed(self, run):
        def text(seed: int) -> str:
            options = ("--temperature", 1.5, "--top-k", 50, "--max-new-tokens", 16)
            return run("generate", "--prompt", "Tell a story.", *options, "--seed", seed).out

        assert text(1) == text(1)
        assert text(1) != text(2)

    def test_characters_of_several_tokens_arrive_whole(self, run):
        finished = run(
            *("generate", "--raw", "--prompt", "Emoji: 😀😀😀😀😀😀😀😀", "--max-new-tokens", 12)
        )
        assert finished.status == 0, finished.err
        assert "\N{REPLACEMENT CHARACTER}" not in finished.out[:-4]

    def test_a_prompt_may_come_from_a_file(self, run, tmp_path):
        (tmp_path / "prompt.txt").write_text("What is the capital of France?", encoding="utf-8")
        finished = run("generate", "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 16)
        assert "Paris" in finished.out
