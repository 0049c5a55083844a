"""Tokenizers: round trips, chat templates in a sandbox, streaming without broken characters."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvjax.models.checkpoint import load
from kvjax.models.orbax import export_hf
from kvjax.models.tokenizer import Tokenizer, find_end_tokens
from tests.models.small import random_model, small_tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "  two spaces, a\ttab,\n\nand newlines \n",
    "numbers 1234567 and 3.14, it's they'll I'D",
    "naïve café — 日本語 \N{SMILING FACE WITH SMILING EYES} \N{FAMILY}",
    "<|im_start|>user\nhello<|im_end|>\n",
    "def f(x):\n    return x**2  # comment",
    "",
]
MESSAGES = [{"role": "user", "content": "hello world"}]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(text):
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_one_id_each_and_skipped_by_default():
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("<|im_start|>he<|im_end|>")
    assert len(ids) == 3 and ids[0] == 1 and ids[-1] == 2
    assert tokenizer.decode(ids) == "he"


def test_chat_renders_the_template():
    tokenizer = small_tokenizer()
    text = tokenizer.chat(MESSAGES)
    assert text == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat_ids(MESSAGES) == tokenizer.encode(text)
    assert not tokenizer.chat(MESSAGES, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set _ = messages.append(1) %}",
        "{{ raise_exception('not for you') }}",
        "{{ unclosed",
    ],
)
def test_templates_run_in_a_sandbox(template):
    with pytest.raises(ValueError, match="chat template refused") as error:
        small_tokenizer(template).chat(MESSAGES)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_template_says_so():
    with pytest.raises(ValueError, match="no chat template"):
        small_tokenizer(None).chat(MESSAGES)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_joins_to_the_decoded_text_and_never_breaks_a_character(text):
    tokenizer = small_tokenizer()
    stream = tokenizer.stream(skip_special_tokens=False)
    ids = tokenizer.encode(text)
    pieces = [stream.push(token) for token in ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


def test_a_stream_flushes_incomplete_bytes_once():
    tokenizer = small_tokenizer()
    stream = tokenizer.stream()
    first = tokenizer.encode("é")[0]
    assert stream.push(first) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""


def test_end_tokens_are_a_set_of_all_terminators():
    assert small_tokenizer().end_tokens == {0, 2}
    assert Tokenizer(small_tokenizer().fast, [5]).end_tokens == {0, 2, 5}
    assert find_end_tokens({"eos_token_id": 3}, {"eos_token_id": [4, 5]}, None, {}) == {3, 4, 5}


def test_the_fingerprint_sees_vocabulary_and_template():
    one, two = small_tokenizer(), small_tokenizer("{{ messages }}")
    assert one.fingerprint == small_tokenizer().fingerprint != two.fingerprint


def test_a_directory_gives_the_tokenizer_that_was_exported(tmp_path):
    tokenizer = small_tokenizer()
    loaded = load(export_hf(random_model(), tokenizer, tmp_path / "model")).tokenizer
    assert loaded.fingerprint == tokenizer.fingerprint
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.chat(MESSAGES) == tokenizer.chat(MESSAGES)


def test_a_damaged_tokenizer_is_named(tmp_path):
    path = export_hf(random_model(), small_tokenizer(), tmp_path / "model")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="unreadable tokenizer") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_importing_transformers_prints_nothing():
    code = "from kvjax.models.tokenizer import import_transformers as f; f()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout == ""


def test_importing_the_models_stays_light():
    code = (
        "import sys, kvjax.models.checkpoint;"
        "heavy = {'transformers', 'orbax', 'gguf', 'huggingface_hub', 'tokenizers', 'torch'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
