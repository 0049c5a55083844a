"""Of a conversation the assistant's words are predicted, up to the end of its turn."""

from __future__ import annotations

import pytest

from tests.eval.tasks import written
from tests.train.data.tokens import StableTokenizer
from train.data import turns
from train.data.chat import ChatSource
from train.data.config import ChatConfig

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello there?"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Good bye."},
]
RENDERED = (
    "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nHello there?<|im_end|>\n<|im_start|>assistant\nGood day.<|im_end|>\n"
    "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\nGood bye.<|im_end|>\n"
)


def source(path, tokenizer=None, **options):
    return ChatSource(ChatConfig(chat=(str(path),), **options), tokenizer or StableTokenizer())


def runs(example, tokenizer) -> list[str]:
    """The texts of the stretches that are predicted."""
    found, before = [], False
    for token, target in zip(example["tokens"], example["targets"], strict=True):
        if target and not before:
            found.append([])
        if target:
            found[-1].append(int(token))
        before = target
    return [tokenizer.decode(tokens) for tokens in found]


def test_only_the_assistants_turns_are_predicted_whatever_the_file(tmp_path):
    tokenizer = StableTokenizer()
    rows = [{"messages": CONVERSATION}]
    for path in (
        written.jsonl(tmp_path / "a.jsonl", rows),
        written.array(tmp_path / "b.json", rows),
        written.parquet(tmp_path / "c.parquet", rows),
    ):
        example = source(path, tokenizer)[0]
        assert tokenizer.decode(example["tokens"]) == RENDERED
        assert runs(example, tokenizer) == ["Good day.<|im_end|>", "Good bye.<|im_end|>"]


def test_all_of_a_conversation_is_predicted_where_asked(tmp_path):
    path = written.jsonl(tmp_path / "a.jsonl", [{"talk": CONVERSATION}])
    assert source(path, field="talk", labels="all")[0]["targets"].all()


class LastDiffers(StableTokenizer):
    """Shows only the last turn's content, as templates do that drop earlier reasoning."""

    def chat(self, messages, add_generation_prompt=True):
        shown = [
            m if i == len(messages) - 1 or m["role"] != "assistant" else {**m, "content": "..."}
            for i, m in enumerate(messages)
        ]
        return super().chat(shown, add_generation_prompt)


class PromptDiffers(StableTokenizer):
    """Its generation prompt is not how an answer's turn begins."""

    def chat(self, messages, add_generation_prompt=True):
        end = "<|im_start|>assistant\n" + "Thought:" if add_generation_prompt else ""
        return super().chat(messages, False) + end


class Endless(StableTokenizer):
    def chat(self, messages, add_generation_prompt=True):
        return super().chat(messages, add_generation_prompt).replace("<|im_end|>", "")


@pytest.mark.parametrize("tokenizer", [LastDiffers(), PromptDiffers()])
def test_templates_that_do_not_append_are_refused(tmp_path, tokenizer):
    path = written.jsonl(tmp_path / "a.jsonl", [{"messages": CONVERSATION}])
    with pytest.raises(ValueError, match="chat template: renders message 1 otherwise"):
        source(path, tokenizer)


def test_an_answers_end_comes_from_the_template():
    assert turns.end_of_turn(StableTokenizer()) == 1
    with pytest.raises(ValueError, match="chat template: no end token follows an answer"):
        turns.end_of_turn(Endless())


def test_a_turn_without_an_end_token_is_predicted_whole():
    tokenizer = Endless()
    example = turns.tokenized(tokenizer, CONVERSATION[1:3], everything=False)
    assert runs(example, tokenizer) == ["Good day.\n"]


def test_rows_that_are_no_conversation_are_refused_in_one_line(tmp_path):
    user, answer = CONVERSATION[1:3]
    for messages, message in (
        (None, "line 1: field 'messages' is None; allowed: a list of objects"),
        ([user], r"field 'messages' is \[.*; allowed: messages of which one, not the first"),
        ([answer, user], "allowed: messages of which one, not the first, is the assistant's"),
        ([user, {"role": "bot", "content": "a"}], r"'messages\[1\].role' is 'bot'; allowed: sys"),
        ([user, {"role": "assistant"}], r"field 'messages\[1\].content' is missing"),
        ([user, {"role": "assistant", "content": None}], r"\[1\].content' is None; allowed: text"),
    ):
        path = written.jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
        with pytest.raises(ValueError, match=message) as caught:
            source(path)
        assert "\n" not in str(caught.value)


def test_the_default_models_template_marks_the_turns(default_model, tmp_path):
    tokenizer = default_model.tokenizer
    path = written.jsonl(tmp_path / "a.jsonl", [{"messages": CONVERSATION}])
    example = source(path, tokenizer)[0]
    ids = example["tokens"].tolist()
    assert ids == tokenizer.encode(tokenizer.chat(CONVERSATION, add_generation_prompt=False))
    predicted = tokenizer.decode(example["tokens"][example["targets"]].tolist(), False)
    assert predicted == "Good day.<|im_end|>Good bye.<|im_end|>"
