"""Prompts cut in two: nothing of the official text is lost at the seam."""

from __future__ import annotations

import pytest

from eval.tasks import documents


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Read.\n\n{text}\n\nNow {ask}:", "A story."),
        ("Read.\n\n{text}\n{ask}", "A story.\n"),
        ("{text}Next {ask}:\n", "x = 1\n"),
        ("{text}Next {ask}:\n", "x = 1\n\n"),
        ("{text}\n\n {ask}", "with {braces} and \n lines"),
    ],
)
def test_the_parts_are_the_official_prompt(template, text):
    context, question = documents.prompt_parts(template, "text", text=text, ask="answer")
    assert f"{context}\n{question}" == template.format(text=text, ask="answer")
    assert text.rstrip("\n") in context and "answer" not in context


def test_a_line_break_is_added_only_where_there_is_none():
    assert documents.prompt_parts("{text}Next", "text", text="x = 1") == ("x = 1", "Next")


def test_a_template_needs_its_document_once():
    for template in ("no field", "{text} and {text}"):
        with pytest.raises(ValueError, match="not exactly once"):
            documents.prompt_parts(template, "text", text="")


def test_an_id_that_occurs_twice_is_refused():
    sample = documents.sample(
        task="t",
        subset="s",
        key=1,
        context="",
        question="",
        answers=("a",),
        max_new_tokens=1,
    )
    assert sample.id == "t/s/1" and sample.task == "t/s" and sample.haystack == "documents"
    with pytest.raises(ValueError, match="sample t/s/1: occurs twice"):
        documents.distinct([sample, sample])
