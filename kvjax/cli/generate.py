"""`kvjax generate`: one answer from a bounded cache, streamed as text."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvjax.cli.options import PAGES, budget_of, pages_of, params_of, policy_of, text_of

if TYPE_CHECKING:
    from kvjax import Budget, Decoder, Generation, PaddedCache, PagedCache, Policy
    from kvjax.models.tokenizer import Tokenizer

DESCRIPTION = """\
Answer a prompt from a KV cache that a policy keeps within a budget. The answer goes to standard
output as it is generated. With --question, the prompt's cache is compressed before the question
is seen, and the question is asked of what stayed."""
EXAMPLE = """\
kvjax generate --prompt "What is the capital of France?"
  kvjax generate --prompt-file book.txt --question "Who is it?" --policy snapkv --budget 25%
  kvjax generate --prompt-file - --policy keydiff --budget 4MiB --stats < notes.txt"""

# Tokens decoded between two looks at the answer: text appears in steps, the device never waits.
BLOCK = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="M", help="name, path or hub id")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT")
    text.add_argument("--prompt-file", metavar="FILE", help="UTF-8 text; - reads standard input")
    add("--question", metavar="TEXT", help="asked after the prompt's cache was compressed")
    add("--raw", action="store_true", help="no chat template around the text")
    add("--policy", default="full", metavar="P", help="see kvjax policies (default: full)")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the policy, such as window=64 or allocator=ada; may be repeated",
    )
    add(
        "--budget",
        metavar="B",
        help="entries per head: tokens (256), a fraction of the prompt (0.25 or 25%%), "
        "or bytes of the cache (64MiB)",
    )
    add("--pages", type=int, metavar="N", help=PAGES)
    add("--chunk", type=int, metavar="N", help="prefill in chunks of N tokens, evicting after each")
    add("--decode-interval", type=int, metavar="N", help="evict again after N generated tokens")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all (default)")
    add("--seed", type=int, default=0, help="of the sampling; default: 0")
    add("--stats", action="store_true", help="report cache and speed on standard error")


def run(arguments: argparse.Namespace) -> None:
    text = _prompt(arguments)
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens}: allowed are integers >= 1")

    import jax

    import kvjax

    sampling = kvjax.Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
    )
    policy = _policy(arguments)
    budget = _budget(arguments.budget, policy)
    pages = pages_of(arguments.pages, policy)
    model, tokenizer = kvjax.load(arguments.model)
    if tokenizer is None:
        raise ValueError(f"{arguments.model}: no tokenizer beside the weights (tokenizer.json)")
    prompt, question = _tokens(tokenizer, text, arguments.question, arguments.raw)
    _check_context(model, len(prompt) + len(question), arguments.max_new_tokens)
    entries = budget.resolve(len(prompt), model.config, model.dtype)
    params = params_of(model, policy, tokenizer)

    start = time.perf_counter()
    logits, cache = kvjax.prefill(
        model,
        [prompt],
        policy=policy,
        budget=entries,
        room=len(question) + arguments.max_new_tokens,
        pages=pages,
        params=params,
    )
    if question:
        logits, cache = kvjax.extend(
            model, cache, [question], policy=policy, budget=entries, params=params
        )
    logits.block_until_ready()
    times = Times(prefill=time.perf_counter() - start)

    text_stream = tokenizer.stream()
    blocks = kvjax.stream(
        model,
        cache,
        logits,
        max_new_tokens=arguments.max_new_tokens,
        block=BLOCK,
        end_tokens=tokenizer.end_tokens,
        sampling=sampling,
        key=jax.random.key(arguments.seed),
        policy=policy,
        budget=entries,
        params=params,
    )
    del logits
    for block in times.measure(blocks):
        cache = block.cache
        for token in block.tokens[0, : int(block.lengths[0])].tolist():
            print(text_stream.push(token), end="", flush=True)
    print(text_stream.flush(), flush=True)
    if arguments.stats:
        lines = (*_cache_lines(model, cache, policy, entries, len(prompt)), *times.lines())
        print("\n".join(lines), file=sys.stderr)


@dataclasses.dataclass(kw_only=True)
class Times:
    """Seconds of one generation; the first block of decoding contains the compilation."""

    prefill: float
    blocks: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    def measure(self, blocks: Iterator[Generation]) -> Iterator[Generation]:
        """Passes the blocks on, noting tokens and seconds of each."""
        while True:
            start = time.perf_counter()
            block = next(blocks, None)
            if block is None:
                return
            count = int(block.lengths[0])  # waits for the device
            self.blocks.append((count, time.perf_counter() - start))
            yield block

    def lines(self) -> tuple[str, str]:
        timed = self.blocks[1:] or self.blocks
        speed = sum(count for count, _ in timed) / sum(seconds for _, seconds in timed)
        note = "" if len(self.blocks) > 1 else ", compilation included"
        return (
            f"prefill  {self.prefill:.1f} s, compilation included",
            f"decode   {speed:.1f} tokens/s{note}",
        )


def _cache_lines(
    model: Decoder, cache: PaddedCache | PagedCache, policy: Policy, entries: int, prompt: int
) -> tuple[str, str, str]:
    from kvjax import nbytes
    from kvjax.budget import entry_nbytes

    seen, kept = int(cache.next_position[0]), round(float(cache.lengths.mean()), 1)
    full = seen * entry_nbytes(model.config, model.dtype)
    return (
        f"policy   {policy.name}, budget {entries} of {prompt} prompt tokens",
        f"cache    {kept:g} entries per head (mean) after {seen} tokens; capacity {cache.capacity}",
        f"bytes    {nbytes(cache) / 2**20:.1f} MiB; all {seen} tokens would take "
        f"{full / 2**20:.1f} MiB",
    )


def _check_context(model: Decoder, given: int, wanted: int) -> None:
    limit = model.config.max_length
    if given + wanted > limit:
        raise ValueError(
            f"prompt of {given} tokens and {wanted} new ones: the model's context is {limit} "
            "tokens; shorten the prompt or lower --max-new-tokens"
        )


def _prompt(arguments: argparse.Namespace) -> str:
    text = text_of(arguments.prompt, arguments.prompt_file)
    if arguments.question is not None and not arguments.question.strip():
        raise ValueError("--question: it is empty; leave it out or give any text")
    return text


def _policy(arguments: argparse.Namespace) -> Policy:
    options: dict[str, Any] = {}
    if arguments.chunk is not None:
        options |= {"prefill": "chunked", "chunk": arguments.chunk}
    if arguments.decode_interval is not None:
        options["decode_interval"] = arguments.decode_interval
    return policy_of(arguments.policy, arguments.option, **options)


def _budget(text: str | None, policy: Policy) -> Budget:
    budget = budget_of(text, [policy])
    if policy.scorer is None and budget.fraction != 1:
        raise ValueError(
            f"--budget {text}: policy {policy.name!r} keeps everything; choose another policy "
            f"(kvjax policies) or leave the budget out"
        )
    return budget


def _tokens(
    tokenizer: Tokenizer, text: str, question: str | None, raw: bool
) -> tuple[list[int], list[int]]:
    """What is prefilled and compressed, and what follows it."""
    if raw:
        asked = [] if question is None else tokenizer.encode(f"\n{question}")
        return tokenizer.encode(text, add_special_tokens=True), asked
    if tokenizer.chat_template is None:
        raise ValueError("this model has no chat template: add --raw to give it plain text")
    from eval.prompt import Template

    template = Template.of(tokenizer)
    if question is None:
        return tokenizer.encode(template.head + text + template.tail), []
    asked = tokenizer.encode(template.question_text(question, ""))
    return tokenizer.encode(template.context_text(text)), asked
