"""Bad input ends with one line that names the value and what is allowed, and exit status 2."""

from __future__ import annotations

import json
import shutil

import pytest

import kvjax

PROMPT = ("generate", "--prompt", "Hello")

# Command line -> what the line has to contain. Nothing here gets as far as loading a model.
REFUSED = {
    "no command": ((), ("COMMAND",)),
    "unknown command": (("evaluate",), ("evaluate", "generate", "eval", "policies", "convert")),
    "unknown option": ((*PROMPT, "--polcy", "snapkv"), ("--polcy",)),
    "no prompt": (("generate",), ("--prompt", "--prompt-file")),
    "two prompts": ((*PROMPT, "--prompt-file", "x"), ("--prompt-file",)),
    "empty prompt": (("generate", "--prompt", ""), ("--prompt", "empty")),
    "blank prompt": (("generate", "--prompt", " \n\t"), ("--prompt", "empty")),
    "empty question": ((*PROMPT, "--question", " "), ("--question", "empty")),
    "missing prompt file": (("generate", "--prompt-file", "nowhere.txt"), ("nowhere.txt",)),
    "prompt file is a folder": (("generate", "--prompt-file", "."), (".", "directory")),
    "unknown policy": ((*PROMPT, "--policy", "snap"), ("'snap'", "snapkv", "h2o", "tova")),
    "unknown policy described": (("policies", "snap"), ("'snap'", "snapkv")),
    "unknown policy option": (
        (*PROMPT, "--policy", "snapkv", "--option", "size=3", "--budget", "0.5"),
        ("'size'", "window", "kernel"),
    ),
    "malformed policy option": (
        (*PROMPT, "--policy", "snapkv", "--option", "window", "--budget", "0.5"),
        ("window", "NAME=VALUE"),
    ),
    "no budget": ((*PROMPT, "--policy", "snapkv"), ("--budget", "25%", "64MiB")),
    "budget for the full cache": ((*PROMPT, "--budget", "0.5"), ("0.5", "full")),
    "no new tokens": ((*PROMPT, "--max-new-tokens", "0"), ("0", ">= 1")),
    "negative temperature": ((*PROMPT, "--temperature", "-1"), ("-1", ">= 0")),
    "temperature that is no number": ((*PROMPT, "--temperature", "nan"), ("nan", ">= 0")),
    "negative top-k": ((*PROMPT, "--top-k", "-3"), ("-3", ">= 0")),
    "top-p of zero": ((*PROMPT, "--top-p", "0"), ("0", "(0, 1]")),
    "word for a number": ((*PROMPT, "--top-k", "many"), ("--top-k", "many")),
    "chunk of zero": (
        (*PROMPT, "--policy", "snapkv", "--budget", "0.5", "--chunk", "0"),
        ("0", ">= 1"),
    ),
    "negative decode interval": (
        (*PROMPT, "--policy", "snapkv", "--budget", "0.5", "--decode-interval", "-1"),
        ("-1", ">= 1"),
    ),
    "missing model": ((*PROMPT, "--model", "./nowhere"), ("./nowhere",)),
    "unknown format": (("convert", "a", "b", "--format", "pt"), ("pt", "orbax", "hf")),
    "unknown dtype": (("convert", "a", "b", "--dtype", "int4"), ("int4", "float32")),
    "missing source": (("convert", "./nowhere", "b"), ("./nowhere",)),
    "missing configuration": (("eval", "--config", "nowhere.yaml"), ("nowhere.yaml",)),
}
BUDGETS = {
    "0": "0",
    "-1": "-1",
    "0.0": "0.0",
    "1.5": "1.5",
    "-0.5": "-0.5",
    "0%": "0",
    "150%": "1.5",
    "0MiB": "0",
    "half": "'half'",
    "nan": "'nan'",
    "": "''",
}


def assert_refused(finished, *fragments: str) -> None:
    assert finished.status == 2
    assert finished.out == ""
    assert finished.err.startswith("kvjax: error: ")
    assert finished.err.count("\n") == 1
    for fragment in fragments:
        assert fragment in finished.err, finished.err


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_the_door(run, case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    arguments, fragments = REFUSED[case]
    assert_refused(run(*arguments), *fragments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("budget", BUDGETS)
def test_budgets_that_are_not_allowed(run, budget):
    finished = run(*PROMPT, "--policy", "snapkv", f"--budget={budget}")
    assert_refused(finished, BUDGETS[budget], "(0, 1]", "64MiB")


def test_a_prompt_file_that_is_no_text(run, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    finished = run("generate", "--prompt-file", tmp_path / "picture.png")
    assert_refused(finished, "picture.png", "UTF-8")


@pytest.fixture
def checkpoint(small_checkpoint, tmp_path):
    """A valid Hugging Face directory, to be damaged."""
    return shutil.copytree(small_checkpoint, tmp_path / "model")


def weights(checkpoint):
    return next(checkpoint.glob("*.safetensors"))


def test_a_missing_shard(run, checkpoint, tmp_path):
    weights(checkpoint).unlink()
    assert_refused(run("convert", checkpoint, tmp_path / "out"), "safetensors")
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard(run, checkpoint, tmp_path):
    file = weights(checkpoint)
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(run("convert", checkpoint, tmp_path / "out"), file.name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickled_checkpoint(run, checkpoint, name):
    weights(checkpoint).rename(checkpoint / name)
    assert_refused(run(*PROMPT, "--model", checkpoint), name, "safetensors", "GGUF")
    assert_refused(run(*PROMPT, "--model", checkpoint / name), name, "safetensors", "GGUF")


def test_a_file_that_is_no_checkpoint(run, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    assert_refused(run(*PROMPT, "--model", tmp_path / "model.gguf"), "model.gguf")


@pytest.mark.parametrize(
    ("setting", "fragments"),
    [
        ({"model_type": "mamba"}, ("mamba", "llama")),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ("longrope", "yarn")),
        ({"hidden_act": "relu"}, ("relu", "silu")),
        ({"num_key_value_heads": 3}, ("3",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_with_an_unsupported_feature(run, checkpoint, setting, fragments):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    assert_refused(run(*PROMPT, "--model", checkpoint), *fragments)


def test_a_model_without_a_tokenizer(run, checkpoint):
    assert_refused(run(*PROMPT, "--model", checkpoint), "tokenizer")


def test_a_destination_that_is_not_empty(run, checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("keep me")
    assert_refused(run("convert", checkpoint, tmp_path / "out"), "out", "not empty")
    assert (tmp_path / "out" / "notes.txt").read_text() == "keep me"


class TestWithTheDefaultModel:
    """What only the loaded model can know."""

    @pytest.fixture(autouse=True)
    def _loaded(self, default_model, monkeypatch):
        monkeypatch.setattr(kvjax, "load", lambda *_, **__: default_model)

    def test_a_prompt_beyond_the_context(self, run):
        finished = run("generate", "--prompt", "word " * 9000)
        assert_refused(finished, "tokens", "8192")

    def test_an_answer_beyond_the_context(self, run):
        finished = run(*PROMPT, "--max-new-tokens", 9000)
        assert_refused(finished, "9000", "8192", "--max-new-tokens")

    def test_more_bytes_than_the_machine_has(self, run):
        finished = run(*PROMPT, "--policy", "knorm", "--budget", "900000GiB")
        assert_refused(finished, "bytes")

    def test_fewer_bytes_than_one_token_takes(self, run):
        finished = run(*PROMPT, "--policy", "knorm", "--budget", "1KiB")
        assert_refused(finished, "1024", "one token")
