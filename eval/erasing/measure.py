"""One sample under every method: what it answers, and how far that is from recomputation."""

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
from eval.erasing.samples import ErasingSample, distractor_hit, exact_match, prompt_of
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


def measure(
    loaded: Any,
    eraser: Any,
    configs: Mapping[str, PolicyConfig],
    sample: ErasingSample,
    max_new_tokens: int,
) -> list[Measured]:
    """The sample under every method, after one prefill."""
    model, tokenizer = loaded
    prompt = prompt_of(sample, tokenizer)
    notes = {
        label: tuple(tokenizer.encode(_NOTE + _quoted(sample)))
        for label, config in configs.items()
        if config.name == "note"
    }
    room = len(prompt.question) + max_new_tokens + max(map(len, notes.values()), default=0)
    room = -(-room // 64) * 64
    _, cache = kvjax.prefill(model, _row(prompt.context), [len(prompt.context)], room=room)
    reply = prompt.question + prompt.answer
    ids, size = _row(reply), jnp.asarray([len(reply)], jnp.int32)
    asked = range(len(prompt.question) - 1, len(reply) - 1)
    places = np.zeros(bucket_length(len(asked)), np.int32)
    places[: len(asked)] = asked
    found, target = [], None
    for label, config in sorted(configs.items(), key=lambda item: item[1].name != RECOMPUTE):
        options = {"note": notes[label]} if label in notes else dict(config.options)
        method: Method = erasing_method(config.name, **options)
        edited = kvjax.erase(
            model,
            eraser if method.needs_eraser else None,
            cache,
            [prompt.context],
            prompt.spans,
            method=method,
        )
        log_p = np.asarray(_log_probabilities(model, edited, ids, size, places))[: len(asked)]
        target = log_p if target is None else target
        text = _answer(loaded, edited, prompt.question, max_new_tokens)
        found.append(
            Measured(
                method=label,
                exact=exact_match(sample, text),
                distractor=distractor_hit(sample, text),
                nll=float(-log_p[np.arange(len(asked)), prompt.answer].mean()),
                kl=float((np.exp(target) * (target - log_p)).sum(axis=1).mean()),
                answer=text,
            )
        )
    order = list(configs)
    return sorted(found, key=lambda one: order.index(one.method))


@jax.jit
def _log_probabilities(
    model: Decoder,
    cache: Cache,
    tokens: Int[Array, "1 T"],
    lengths: Int[Array, " 1"],
    places: Int[Array, " N"],
) -> Float32[Array, "N V"]:
    """log p of the token behind each place of a continuation."""
    x: Float[Array, "1 T E"] = residual_stream(model, cache, tokens, lengths)
    return jax.nn.log_softmax(model.logits(x[0, places]).astype(jnp.float32), axis=-1)


def _answer(loaded: Any, cache: Cache, question: Sequence[int], max_new_tokens: int) -> str:
    """The greedy reply to the question."""
    model, tokenizer = loaded
    logits, cache = kvjax.extend(model, cache, _row(question), [len(question)])
    ends = tuple(sorted(tokenizer.end_tokens))
    out = kvjax.generate(model, cache, logits, max_new_tokens=max_new_tokens, end_tokens=ends)
    return tokenizer.decode(out.tokens[0, : int(out.lengths[0])].tolist())


def _row(ids: Sequence[int]) -> Int[np.ndarray, "1 T"]:
    row = np.zeros((1, bucket_length(len(ids))), np.int32)
    row[0, : len(ids)] = ids
    return row


def _quoted(sample: ErasingSample) -> str:
    """How the span begins, as a note points to it."""
    spans = [part.text.split() for part in sample.parts if part.erased]
    return " and ".join(f'"{" ".join(words[:12])} ..."' for words in spans) + "."
