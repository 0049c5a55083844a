"""`kvjax inspect`: a page that shows which tokens a policy kept."""

from __future__ import annotations

import argparse
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.options import budget_of, policy_of, text_of

if TYPE_CHECKING:
    from kvjax import Decoder, Policy
    from kvjax.cache import Cache
    from kvjax.models.tokenizer import Tokenizer

DESCRIPTION = """\
Write one HTML page on which the tokens of a prompt are shaded by how many (layer, head) pairs kept
them. With a second --policy, both are shown and where they differ. The prompt is read once for
both. The page loads nothing and can be mailed."""
EXAMPLE = """\
kvjax inspect --policy snapkv --budget 25% --prompt-file book.txt --output kept.html
  kvjax inspect --policy snapkv:window=64 --policy keydiff --budget 256 --prompt-file book.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="M", help="name, path or hub id")
    add(
        "--policy",
        action="append",
        required=True,
        metavar="P",
        help="NAME or NAME:OPTION=VALUE,... (see kvjax policies); twice to compare two",
    )
    add(
        "--budget",
        metavar="B",
        help="entries per head: tokens (256), a fraction of the prompt (0.25 or 25%%), "
        "or bytes of the cache (64MiB)",
    )
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT")
    text.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text; - reads standard input")
    add("--raw", action="store_true", help="no chat template around the text")
    add("--pages", type=int, metavar="N", help="paged caches with pages of N slots")
    add("--output", default="inspect.html", metavar="FILE", help="default: inspect.html")


def run(arguments: argparse.Namespace) -> None:
    text = text_of(arguments.prompt, arguments.prompt_file)
    if len(arguments.policy) > 2:
        raise ValueError(f"{len(arguments.policy)} policies: allowed are one, or two to compare")
    output = Path(arguments.output)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: allowed is a file in a directory that exists")
    policies = [_policy(given) for given in arguments.policy]
    budget = budget_of(arguments.budget, policies)

    import kvjax
    from kvjax.inspection import View, render_page, token_texts

    model, tokenizer = kvjax.load(arguments.model)
    if tokenizer is None:
        raise ValueError(f"{arguments.model}: no tokenizer beside the weights (tokenizer.json)")
    tokens = _tokens(tokenizer, text, arguments.raw)
    entries = budget.resolve(len(tokens), model.config, model.dtype)
    caches = _caches(model, tokenizer, tokens, policies, entries, arguments.pages)
    names = [given.partition(":")[0] for given in arguments.policy]
    if len(set(names)) < len(names):  # then their options tell them apart
        names = arguments.policy
    views = [View.of(name, cache, len(tokens)) for name, cache in zip(names, caches, strict=True)]
    page = render_page(
        token_texts(tokenizer, tokens),
        views,
        model=arguments.model,
        budget=f"{entries:,} entries per head",
        full_nbytes=len(tokens) * kvjax.budget.entry_nbytes(model.config, model.dtype),
    )
    partial = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    for view in views:
        share = 100 * view.entries / view.kept.size
        print(f"{view.name}: {view.entries:,} entries ({share:.1f} %), {view.nbytes:,} bytes")
    print(output)


def _caches(
    model: Decoder,
    tokenizer: Tokenizer,
    tokens: list[int],
    policies: list[Policy],
    entries: int,
    pages: int | None,
) -> list[Cache]:
    """What each policy keeps; those that evict in whole prefill share one."""
    import kvjax
    from kvjax.inference import replay

    whole = [policy for policy in policies if policy.schedule.prefill == "whole"]
    if whole:
        _, full, observed = kvjax.observe(model, [tokens], policies=whole)
        if any("replay" in policy.needs for policy in whole):
            observed = replay(model, full, observed, [tokens], tokenizer=tokenizer)
    caches = []
    for policy in policies:
        if policy in whole:
            cache = kvjax.compress(
                model, full, observed, policy=policy, budget=entries, pages=pages
            )
        else:
            _, cache = kvjax.prefill(model, [tokens], policy=policy, budget=entries, pages=pages)
        caches.append(cache)
    return caches


def _policy(given: str) -> Policy:
    name, _, settings = given.partition(":")
    return policy_of(name, [setting for setting in settings.split(",") if setting])


def _tokens(tokenizer: Tokenizer, text: str, raw: bool) -> list[int]:
    if raw:
        return tokenizer.encode(text, add_special_tokens=True)
    if tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: add --raw to give it plain text")
    from kvjax.turns import TurnTemplate

    template = TurnTemplate.of(tokenizer)
    return tokenizer.encode(template.preface + template.first_opening + template.said(text))
