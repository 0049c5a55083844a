"""`kvjax inspect`: a page that shows which tokens a policy kept."""

from __future__ import annotations

import argparse
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.cli.options import (
    PAGES,
    budget_of,
    pages_of,
    params_of,
    policy_of,
    text_of,
    tokens_of,
)

if TYPE_CHECKING:
    from kvjax import Decoder, PaddedCache, Policy
    from kvjax.cache import Cache
    from kvjax.models.tokenizer import Tokenizer

DESCRIPTION = """\
Write one HTML page on which the tokens of a prompt are shaded by how many (layer, head) pairs kept
them. With a second --policy, both are shown and where they differ. The prompt is read once for
both. With --dilution and --question, the page also shows which share of the question's attention
falls on a passage of the prompt, from the full cache and from what each policy kept of it. The
page loads nothing and can be mailed."""
EXAMPLE = """\
kvjax inspect --policy snapkv --budget 25% --prompt-file book.txt --output kept.html
  kvjax inspect --policy snapkv:window=64 --policy keydiff --budget 256 --prompt-file book.txt
  kvjax inspect --policy kvzip --budget 25% --prompt-file book.txt \\
    --question "Where is the key?" --dilution "The key lies under the mat.\""""


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
    add(
        "--dilution",
        metavar="TEXT",
        help="a passage that occurs once in the prompt: plot the attention on it, full cache "
        "against evicted; needs --question",
    )
    add("--question", metavar="TEXT", help="whose attention --dilution plots, behind the prompt")
    add("--pages", type=int, metavar="N", help=PAGES)
    add("--output", default="inspect.html", metavar="FILE", help="default: inspect.html")


def run(arguments: argparse.Namespace) -> None:
    text = text_of(arguments.prompt, arguments.prompt_file)
    if len(arguments.policy) > 2:
        raise ValueError(f"{len(arguments.policy)} policies: allowed are one, or two to compare")
    output = Path(arguments.output)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output {output}: allowed is a file in a directory that exists")
    _check_passage(text, arguments.dilution, arguments.question)
    policies = [_policy(given) for given in arguments.policy]
    budget = budget_of(arguments.budget, policies)
    pages = [pages_of(arguments.pages, policy) for policy in policies]

    import numpy as np

    import kvjax
    from kvjax.dilution import passage_tokens, useful_mass
    from kvjax.inspection import View, render_page
    from kvjax.inspection_dilution import Dilution
    from kvjax.passages import token_texts

    model, tokenizer = kvjax.load(arguments.model)
    if tokenizer is None:
        raise ValueError(f"{arguments.model}: no tokenizer beside the weights (tokenizer.json)")
    tokens, asked = tokens_of(tokenizer, text, arguments.question, arguments.raw)
    if len(tokens) + len(asked) > model.config.max_length:
        raise ValueError(
            f"prompt of {len(tokens)} tokens and question of {len(asked)}: the model's context is "
            f"{model.config.max_length} tokens; shorten one of them"
        )
    entries = budget.resolve(len(tokens), model.config, model.dtype)
    params = [params_of(model, policy, tokenizer) for policy in policies]
    full, caches = _caches(model, tokenizer, tokens, policies, params, entries, pages)
    names = [given.partition(":")[0] for given in arguments.policy]
    if len(set(names)) < len(names):  # then their options tell them apart
        names = arguments.policy
    views = [View.of(name, cache, len(tokens)) for name, cache in zip(names, caches, strict=True)]
    texts = token_texts(tokenizer, tokens)
    dilution = None
    if arguments.dilution is not None:
        useful = passage_tokens(texts, arguments.dilution)
        if full is None:
            _, full, _ = kvjax.observe(model, [tokens])
        inputs = [np.asarray(row)[None] for row in (asked, len(asked), useful)]
        masses = [np.asarray(useful_mass(model, full, *inputs))[:, 0]]
        for cache, policy, given in zip(caches, policies, params, strict=True):
            mass = useful_mass(model, cache, *inputs, policy=policy, params=given)
            masses.append(np.asarray(mass)[:, 0])
        dilution = Dilution(question=arguments.question, useful=useful, masses=tuple(masses))
    page = render_page(
        texts,
        views,
        model=arguments.model,
        budget=f"{entries:,} entries per head",
        full_nbytes=len(tokens) * kvjax.budget.entry_nbytes(model.config, model.dtype),
        dilution=dilution,
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
    if dilution is not None:
        print(*dilution.lines(views), sep="\n")
    print(output)


def _caches(
    model: Decoder,
    tokenizer: Tokenizer,
    tokens: list[int],
    policies: list[Policy],
    params: list[Any],
    entries: int,
    pages: list[int | None],
) -> tuple[PaddedCache | None, list[Cache]]:
    """What each policy keeps; those that evict in whole prefill share one, whose cache is first."""
    import kvjax
    from kvjax.inference import replay

    full = None
    whole = [policy for policy in policies if policy.schedule.prefill == "whole"]
    if whole:
        _, full, observed = kvjax.observe(model, [tokens], policies=whole)
        if any("replay" in policy.needs for policy in whole):
            observed = replay(model, full, observed, [tokens], tokenizer=tokenizer)
    caches = []
    for policy, given, page_size in zip(policies, params, pages, strict=True):
        options: dict[str, Any] = {
            "policy": policy,
            "budget": entries,
            "pages": page_size,
            "params": given,
        }
        if policy in whole and full is not None:
            cache = kvjax.compress(model, full, observed, **options)
        else:
            _, cache = kvjax.prefill(model, [tokens], **options)
        caches.append(cache)
    return full, caches


def _policy(given: str) -> Policy:
    name, _, settings = given.partition(":")
    return policy_of(name, [setting for setting in settings.split(",") if setting])


def _check_passage(text: str, passage: str | None, question: str | None) -> None:
    if passage is None and question is None:
        return
    if passage is None or question is None:
        given, missing = (
            ("--question", "--dilution") if passage is None else ("--dilution", "--question")
        )
        raise ValueError(f"{given} without {missing}: allowed are both or neither")
    if not question.strip():
        raise ValueError("--question: it is empty; allowed is any text")
    from kvjax.dilution import check_passage

    check_passage(text, passage)
