"""Samples under every method: what it answers, and how far that is from recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

import kvjax
from eval.config import PolicyConfig
from eval.erasing.samples import (
    ErasingPrompt,
    ErasingSample,
    distractor_hit,
    exact_match,
    prompt_of,
)
from kvjax.budget import bucket_length
from kvjax.cache import Cache
from kvjax.erasing import Method, erasing_method
from kvjax.likelihood import residual_stream
from kvjax.models.decoder import Decoder

NONE, RECOMPUTE = "none", "recompute"
_NOTE = "\nIgnore this passage of the text, as though it had never been there: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a method leaves of one sample. `nll` and `kl` are nats per token of the right answer.

    `kl` is KL(recomputed || edited), 0 for recomputation itself.
    """

    method: str
    exact: float
    distractor: float
    nll: float
    kl: float
    answer: str


def labelled(configs: Sequence[PolicyConfig]) -> dict[str, PolicyConfig]:
    """The methods to run by label, both ends of the scale first."""
    ends = [PolicyConfig(name=NONE), PolicyConfig(name=RECOMPUTE)]
    return {config.label: config for config in (*ends, *configs)}


def check(configs: Mapping[str, PolicyConfig]) -> None:
    """Refuses methods and options that there are not."""
    for config in configs.values():
        if config.name != "note":
            erasing_method(config.name, **dict(config.options))
        elif config.options:
            raise ValueError("method 'note' takes no options here: its text quotes the span")


def check_answer(prompt: ErasingPrompt, max_new_tokens: int) -> None:
    """Refuses an answer that no reply has room for."""
    if (length := len(prompt.answer)) > max_new_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: an answer has {length} tokens; give that or more"
        )


def measure(
    loaded: Any,
    eraser: Any,
    configs: Mapping[str, PolicyConfig],
    samples: Sequence[ErasingSample],
    max_new_tokens: int,
) -> list[list[Measured]]:
    """Each sample under every method; one prefill, and one edit per method, serve them all."""
    model, tokenizer = loaded
    prompts = [prompt_of(sample, tokenizer) for sample in samples]
    for prompt in prompts:
        check_answer(prompt, max_new_tokens)
    notes = [tokenizer.encode(_NOTE + _quoted(sample)) for sample in samples]
    noted = any(config.name == "note" for config in configs.values())
    questions = [prompt.question for prompt in prompts]
    room = max(map(len, questions)) + max_new_tokens + (max(map(len, notes)) if noted else 0)
    room = -(-room // 64) * 64
    contexts = [prompt.context for prompt in prompts]
    ids, lengths = _rows(contexts)
    _, cache = kvjax.prefill(model, ids, lengths, room=room)
    replies = [prompt.question + prompt.answer for prompt in prompts]
    asked = [range(len(q) - 1, len(reply) - 1) for q, reply in zip(questions, replies, strict=True)]
    places, _ = _rows(asked)
    spans = np.zeros((len(samples), max(len(prompt.spans) for prompt in prompts), 2), np.int32)
    for row, prompt in zip(spans, prompts, strict=True):
        row[: len(prompt.spans)] = prompt.spans
    found: dict[str, list[Measured]] = {}
    targets: list[np.ndarray] = []
    for label, config in sorted(configs.items(), key=lambda item: item[1].name != RECOMPUTE):
        if config.name == "note":  # `PromptNote`, each row its own
            edited = kvjax.extend(model, cache, *_rows(notes))[1]
        else:
            method: Method = erasing_method(config.name, **dict(config.options))
            used = eraser if method.needs_eraser else None
            edited = kvjax.erase(model, used, cache, ids, spans, method=method)
        read = np.asarray(_log_probabilities(model, edited, *_rows(replies), places))
        log_p = [row[: len(those)] for row, those in zip(read, asked, strict=True)]
        targets = targets or log_p
        answers = _answers(loaded, edited, questions, max_new_tokens)
        found[label] = [
            Measured(
                method=label,
                exact=exact_match(sample, text),
                distractor=distractor_hit(sample, text),
                nll=float(-mine[np.arange(len(mine)), prompt.answer].mean()),
                kl=float((np.exp(target) * (target - mine)).sum(axis=1).mean()),
                answer=text,
            )
            for sample, prompt, text, mine, target in zip(
                samples, prompts, answers, log_p, targets, strict=True
            )
        ]
    return [[found[label][row] for label in configs] for row in range(len(samples))]


@jax.jit
def _log_probabilities(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    places: Int[Array, "B N"],
) -> Float32[Array, "B N V"]:
    """log p of the token behind each place of a continuation."""
    x: Float[Array, "B T E"] = residual_stream(model, cache, tokens, lengths)
    x = jnp.take_along_axis(x, places[:, :, None], axis=1)
    return jax.nn.log_softmax(model.logits(x).astype(jnp.float32), axis=-1)


def _answers(
    loaded: Any, cache: Cache, questions: Sequence[Sequence[int]], max_new_tokens: int
) -> list[str]:
    """The greedy replies to the questions."""
    model, tokenizer = loaded
    logits, cache = kvjax.extend(model, cache, *_rows(questions))
    ends = tuple(sorted(tokenizer.end_tokens))
    out = kvjax.generate(model, cache, logits, max_new_tokens=max_new_tokens, end_tokens=ends)
    rows = zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True)
    return [tokenizer.decode(tokens[:length].tolist()) for tokens, length in rows]


def _rows(ids: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, " B"]]:
    """Rows padded to one bucket, and their lengths."""
    lengths = np.asarray([len(row) for row in ids], np.int32)
    rows = np.zeros((len(ids), bucket_length(int(lengths.max()))), np.int32)
    for row, given in zip(rows, ids, strict=True):
        row[: len(given)] = given
    return rows, lengths


def _quoted(sample: ErasingSample) -> str:
    """How the span begins, as a note points to it."""
    spans = [part.text.split() for part in sample.parts if part.erased]
    return " and ".join(f'"{" ".join(words[:12])} ..."' for words in spans) + "."
