"""`kvjax erase`: a passage of a context that was read already, and what is answered without it."""

from __future__ import annotations

import argparse
import re
import time
from typing import TYPE_CHECKING, Any

from kvjax.cli.options import settings_of, text_of, tokens_of

if TYPE_CHECKING:
    from kvjax import Decoder
    from kvjax.cache import Cache
    from kvjax.erasing import Method
    from kvjax.models.tokenizer import Tokenizer

DESCRIPTION = """\
Read a context, take a passage out of its cache, and ask a question before and after. Also shown
are the answer and the time of full recomputation, which prefills everything behind the passage
again. This suppresses the passage, it does not delete data: what stands behind it still holds
traces. kveraser, the default, and hybrid take the eraser that ships for the default model, or
--eraser; other methods need none."""
EXAMPLE = """\
kvjax erase --context-file notes.txt --span "The code is 7421." --question "What is the code?" \\
    --method mask
  kvjax erase --context-file notes.txt --span 120:180 --question "Why?" --eraser runs/eraser/export
  kvjax erase --context-file notes.txt --span 120:180 --question "Why?" --method local-repair \\
    --option tokens=64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="M", help="name, path or hub id")
    add("--context-file", required=True, metavar="FILE", help="UTF-8 text; - reads standard input")
    add(
        "--span",
        required=True,
        metavar="SPAN",
        help="the passage: text that occurs once in the context, or START:STOP in characters",
    )
    add("--question", required=True, metavar="TEXT", help="asked before and after the edit")
    add("--eraser", metavar="DIR", help="a trained eraser; default: the one that ships")
    add(
        "--method",
        default="kveraser",
        metavar="NAME",
        help="kveraser (default), hybrid, none, mask, delete-and-shift, local-repair, cacheblend, "
        "recompute or note",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the method, such as tokens=64 or note=TEXT; may be repeated",
    )
    add("--raw", action="store_true", help="no chat template around the text")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")


def run(arguments: argparse.Namespace) -> None:
    text = text_of(None, arguments.context_file)
    if not arguments.question.strip():
        raise ValueError("--question: it is empty; allowed is any text")
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens}: allowed are integers >= 1")
    start, stop = _characters(arguments.span, text)

    import kvjax
    from kvjax.erasing import METHODS
    from kvjax.passages import token_texts

    options = settings_of(arguments.option, "method")
    note = options.get("note")
    if isinstance(note, str):
        options["note"] = (0,)  # counted and encoded once the tokenizer is there
    method = kvjax.erasing_method(arguments.method, **options)
    model, tokenizer = kvjax.load(arguments.model)
    if tokenizer is None:
        raise ValueError(f"{arguments.model}: no tokenizer beside the weights (tokenizer.json)")
    if isinstance(note, str):
        method = METHODS["note"](note=tuple(tokenizer.encode(note)))  # type: ignore[call-arg]
    eraser = kvjax.load_eraser(model, arguments.eraser) if method.needs_eraser else None
    tokens, question = tokens_of(tokenizer, text, arguments.question, arguments.raw)
    room = len(question) + arguments.max_new_tokens + len(getattr(method, "note", ()))
    if len(tokens) + room > model.config.max_length:
        raise ValueError(
            f"context of {len(tokens)} tokens and {room} for question and answer: the model's "
            f"context is {model.config.max_length} tokens; shorten one of them"
        )
    span = _tokens(token_texts(tokenizer, tokens), text, start, stop)

    _, cache = kvjax.prefill(model, [tokens], room=room)
    edits = {
        name: _timed(model, eraser, cache, tokens, span, chosen)
        for name, chosen in (("after", method), ("recomputed", kvjax.erasing_method("recompute")))
    }
    answer = _asker(model, tokenizer, question, arguments.max_new_tokens)
    print(f"before      {answer(cache)}")
    for name, (edited, _) in edits.items():
        print(f"{name:11} {answer(edited)}")
    seconds, full = (spent for _, spent in edits.values())
    erased, behind = span[1] - span[0], len(tokens) - span[1]
    print(f"{method.name}: {seconds:.3f} s for {erased} tokens, {behind} stand behind them")
    print(f"full recomputation: {full:.3f} s, {full / max(seconds, 1e-9):.1f} times as long")


def _characters(span: str, text: str) -> tuple[int, int]:
    """Start and stop of the passage in the context's characters."""
    if given := re.fullmatch(r"(\d+):(\d+)", span.strip()):
        start, stop = map(int, given.groups())
        if not start < stop <= len(text):
            raise ValueError(
                f"--span {span}: allowed are START < STOP <= {len(text)}, the characters there are"
            )
        if not text[start:stop].strip():
            raise ValueError(f"--span {span}: nothing but white space stands there")
        return start, stop
    if not span.strip():
        raise ValueError("--span: it is empty; allowed is text of the context, or START:STOP")
    places = [at for at in range(len(text)) if text.startswith(span, at)]
    if len(places) != 1:
        found = "does not occur in the context"
        if places:
            shown = ", ".join(f"{at}:{at + len(span)}" for at in places[:5])
            found = f"occurs {len(places)} times; choose a range, such as {shown}"
        raise ValueError(f"--span {span!r}: it {found}")
    return places[0], places[0] + len(span)


def _tokens(texts: list[str], text: str, start: int, stop: int) -> tuple[int, int]:
    """The tokens of text[start:stop]; a template may strip the text and puts its own before it."""
    from kvjax.passages import token_span

    joined = "".join(texts)
    body = text if text in joined else text.strip()
    begin = joined.find(body)
    if begin < 0:
        raise ValueError("--context-file: its tokens do not spell it, so no passage can be found")
    shift = begin - text.find(body)
    return token_span(texts, max(start + shift, begin), min(stop + shift, begin + len(body)))


def _timed(
    model: Decoder,
    eraser: Any,
    cache: Cache,
    tokens: list[int],
    span: tuple[int, int],
    method: Method,
) -> tuple[Any, float]:
    """The edited cache, and the seconds of an edit in place that is compiled already."""
    import jax
    import jax.numpy as jnp

    import kvjax

    for _ in range(2):
        own = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
        begun = time.perf_counter()
        edited = kvjax.erase(model, eraser, own, [tokens], span, method=method, donate=True)
        jax.block_until_ready(edited)
        seconds = time.perf_counter() - begun
    return edited, seconds


def _asker(model: Decoder, tokenizer: Tokenizer, question: list[int], limit: int) -> Any:
    import kvjax

    def answer(cache: Cache) -> str:
        logits, asked = kvjax.extend(model, cache, [question])
        said = kvjax.generate(
            model, asked, logits, max_new_tokens=limit, end_tokens=tokenizer.end_tokens
        )
        return " ".join(tokenizer.decode(said.tokens[0, : int(said.lengths[0])].tolist()).split())

    return answer
