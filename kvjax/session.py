"""Many turns with one bounded cache."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import assembly, forgetting, inference, sizing
from kvjax.budget import Budget
from kvjax.cache import Cache, nbytes
from kvjax.cache.entries import first_range, kept_mask
from kvjax.cache.rollback import rollback
from kvjax.cache.storage import check_model, load_cache, read_card, save_cache
from kvjax.conversation import Conversation, Turn
from kvjax.erasing import Method
from kvjax.generation import Sampling
from kvjax.learned.eraser import Eraser
from kvjax.models.decoder import Decoder
from kvjax.policies.base import Policy
from kvjax.policies.registry import policy as named_policy
from kvjax.turns import ChatTokenizer, TurnTemplate

BLOCK = 8  # tokens decoded between two looks at the answer
DEFAULT_ROOM = 64
_NARROWEST = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a session that are kept when it is saved."""

    budget: int
    room: int
    context: int
    chunk: int
    system: str | None
    pin_system: bool
    pages: int | None
    seed: int


class Session:
    """A conversation that remembers within a budget.

    Every turn is rendered by the chat template (only what is new), run against the evicted cache
    in pieces of at most `chunk` tokens, answered, and the cache is cut back to the budget. While
    a turn is under way it may use `room` entries per head above the budget; the capacity of the
    cache is a hard bound at every step.

    Arrays never change: a turn replaces the cache, so a fork shares memory until it goes on, and
    a turn that fails leaves the session as it was.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: ChatTokenizer,
        *,
        policy: Policy | str = "full",
        budget: Any = 1.0,
        room: int | None = None,
        context: int | None = None,
        chunk: int | None = None,
        system: str | None = None,
        pin_system: bool = True,
        pages: int | None = None,
        params: Any = None,
        seed: int = 0,
    ) -> None:
        """An empty conversation.

        Args:
          model, tokenizer: as `kvjax.load` gives them; the tokenizer needs a chat template.
          policy: a `Policy` or a registered name.
          budget: entries per head (int), bytes ("64MiB") or a fraction of `context` (float).
          room: entries per head above the budget before a turn is cut while it is under way;
            default the policy's decode interval, or 64.
          context: tokens this session may see; default the model's context.
          chunk: tokens run at a time; default the policy's.
          system: the system prompt; None leaves it to the template.
          pin_system: never evict a system prompt that is given.
          pages: page size of a paged cache; None for a padded one.
          params: learned arrays of the policy, stacked over layers.
          seed: of the sampling; a turn depends on it and on the position only.

        Raises:
          ValueError: a template, budget or policy that cannot serve; a pinned system prompt that
            does not fit into the budget.
        """
        policy = named_policy(policy) if isinstance(policy, str) else policy
        if "replay" in policy.needs:
            raise ValueError(
                f"policy {policy.name!r} replays the whole prompt, which a session no longer has; "
                "choose one that scores from its state (kvjax policies)"
            )
        limit = model.config.max_length
        context = limit if context is None else context
        if not 1 <= context <= limit:
            raise ValueError(f"context {context}: allowed are 1 to {limit}, the model's context")
        chunk = policy.schedule.chunk if chunk is None else chunk
        if room is None:
            room = policy.schedule.decode_interval or DEFAULT_ROOM
        if room < 1 or chunk < 1:
            raise ValueError(f"room {room}, chunk {chunk}: allowed are integers >= 1")
        entries = Budget.parse(budget).resolve(context, model.config, model.dtype)
        self.model, self.tokenizer, self.params = model, tokenizer, params
        self.context, self.chunk, self.budget = context, chunk, entries
        self._template = TurnTemplate.of(tokenizer, system)
        self._preface = tokenizer.encode(self._template.preface)
        self._closing = tokenizer.encode(self._template.closing)
        pinned = len(self._preface) if system is not None and pin_system else 0
        self.policy = _for_turns(policy, entries, room, pinned)
        self._settings = Settings(
            budget=entries,
            room=room,
            context=context,
            chunk=chunk,
            system=system,
            pin_system=pin_system,
            pages=pages,
            seed=seed,
        )
        self._cache = self._empty_cache()
        self._conversation = Conversation()

    @property
    def cache(self) -> Cache:
        """The cache between turns, one row."""
        return self._cache

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns so far, with texts and positions."""
        return self._conversation.turns

    @property
    def tokens_seen(self) -> int:
        """Tokens of the whole conversation, evicted ones included: the next position."""
        return self._conversation.tokens_seen

    @property
    def slots(self) -> int:
        """Entries kept per head, on average over layers and heads."""
        return round(float(np.mean(np.asarray(self._cache.lengths))))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the cache."""
        return nbytes(self._cache)

    def send(
        self,
        text: str,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling = Sampling(),
        key: Array | None = None,
    ) -> str:
        """Says `text` and returns the answer; see `stream`."""
        return "".join(self.stream(text, max_new_tokens=max_new_tokens, sampling=sampling, key=key))

    def stream(
        self,
        text: str,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling = Sampling(),
        key: Array | None = None,
    ) -> Generator[str, None, None]:
        """Says `text` and yields the answer in pieces, which joined are the answer.

        The turn is part of the session once the generator has ended. Closing it earlier ends the
        answer with the last piece it gave; an exception inside leaves the session as it was.

        Raises:
          ValueError: an empty turn, or one for which the session's context has no room left.
        """
        if not text.strip():
            raise ValueError("empty turn: allowed is any text")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {max_new_tokens}: allowed are integers >= 1")
        start = self._conversation
        question = self.tokenizer.encode(
            self._template.turn(text, first=start.tokens_seen == 0, unclosed=start.unclosed)
        )
        preface = [] if start.tokens_seen else self._preface
        needed = start.tokens_seen + len(preface) + len(question) + len(self._closing)
        if needed >= self.context:
            raise ValueError(
                f"turn of {len(question)} tokens: {start.tokens_seen} of the session's context of "
                f"{self.context} tokens are used; roll back, reset, or send less"
            )
        limit = min(max_new_tokens, self.context - needed)
        if key is None:
            key = jax.random.fold_in(jax.random.key(self._settings.seed), start.tokens_seen)
        return self._answer(text, preface, question, limit, sampling, key)

    def fork(self) -> Session:
        """An independent copy; it shares memory until one of the two goes on."""
        return copy.copy(self)

    def reset(self) -> None:
        """Forgets the whole conversation."""
        self._cache = self._empty_cache()
        self._conversation = Conversation()

    def rollback(self, to_position: int, *, allow_missing: bool = False) -> Int[np.ndarray, "L K"]:
        """Goes back to when `to_position` tokens had been seen, e.g. `turns[-1].start`.

        Entries before `to_position` that were evicted since cannot come back.

        Returns:
          For each layer and KV head, how many positions before `to_position` it lacks.

        Raises:
          ValueError: a position not seen yet; or missing positions, unless `allow_missing`.
        """
        if not 0 <= to_position <= self.tokens_seen:
            raise ValueError(
                f"rollback to {to_position}: allowed are 0 to {self.tokens_seen}, the tokens seen"
            )
        missing = ~kept_mask(self._cache, to_position)
        if missing.any() and not allow_missing:
            raise ValueError(f"rollback to {to_position}: {_gone(missing)}")
        self._cache = rollback(self._cache, jnp.asarray([to_position], jnp.int32))
        self._conversation = self._conversation.cut(to_position)
        return missing.sum(axis=2)

    def erase(
        self,
        span: tuple[int, int] | None = None,
        *,
        text: str | None = None,
        turn: int | None = None,
        method: Method | str = "kveraser",
        eraser: Eraser | None = None,
    ) -> tuple[int, int]:
        """Makes the conversation go on as though a part of it had not been said.

        It suppresses, it does not delete: `turns`, and a saved session, still hold the text.

        Args:
          span: token positions (start, stop), or what is meant by `text` and `turn`.
          text: a passage that occurs once, in the conversation or in the `turn`.
          turn: an index into `turns`; without a text, what the user said in it.
          method, eraser: as `kvjax.erase` takes them. A method that moves what follows moves the
            turns' positions too.

        Returns:
          The token positions that were erased.

        Raises:
          ValueError: text that occurs several times or not at all; whatever `kvjax.erase` refuses.
        """
        tail = self._template.tail
        found = forgetting.find(self._conversation, self.tokenizer, tail, span, text, turn)
        self._cache, self._conversation = forgetting.forget(
            self.model, self._cache, self._conversation, found, method, eraser
        )
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes cache and conversation to one file, whole or not at all."""
        return save_cache(
            self._cache,
            path,
            model=self.model,
            policy=self.policy,
            budget=self.budget,
            params=self.params,
            record={
                "tokenizer": self.tokenizer.fingerprint,
                "settings": dataclasses.asdict(self._settings),
                "conversation": dataclasses.asdict(self._conversation),
            },
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Decoder,
        tokenizer: ChatTokenizer,
        policy: Policy | str,
        *,
        params: Any = None,
    ) -> Session:
        """A saved session, with the model, tokenizer and policy it was saved with.

        Raises:
          ValueError: another model, tokenizer, policy or setting; a truncated or foreign file.
        """
        card = read_card(path)
        check_model(card, model, path)
        if not isinstance(card.record, dict) or "conversation" not in card.record:
            raise ValueError(f"{path}: a cache without a conversation; load_cache reads it")
        if card.record["tokenizer"] != tokenizer.fingerprint:
            raise ValueError(
                f"{path}: session with tokenizer {card.record['tokenizer']}, given is "
                f"{tokenizer.fingerprint}"
            )
        policy = named_policy(policy) if isinstance(policy, str) else policy
        if policy.name != card.policy:
            raise ValueError(
                f"{path}: session with policy {card.policy!r}, given is {policy.name!r}"
            )
        session = cls(model, tokenizer, policy=policy, params=params, **card.record["settings"])
        session._cache = load_cache(path, model=model, policy=session.policy, params=params)
        session._conversation = Conversation.from_dict(card.record["conversation"])
        return session

    def _answer(
        self,
        text: str,
        preface: list[int],
        question: list[int],
        limit: int,
        sampling: Sampling,
        key: Array,
    ) -> Generator[str, None, None]:
        start = self._conversation
        logits, cache = self._feed(self._cache, preface + question)
        answer: list[int] = []
        pending: list[int] = []  # shown, but not in `cache` yet
        pieces: list[str] = []
        decoder, ended = self.tokenizer.stream(), False

        def complete() -> None:
            _, kept = self._feed(cache, pending + self._closing, end=True)
            self._cache = kept
            self._conversation = start.with_turn(
                self._template.said(text),
                "".join(pieces),
                preface=preface,
                question=question,
                answered=answer + self._closing,
            )

        try:
            while not ended and len(answer) < limit:
                block = inference.generate(
                    self.model,
                    cache,
                    logits,
                    max_new_tokens=BLOCK,
                    end_tokens=self.tokenizer.end_tokens,
                    sampling=sampling,
                    key=jax.random.fold_in(key, len(answer)),
                    policy=self.policy,
                    budget=self.budget,
                    params=self.params,
                )
                tokens = block.tokens[0, : int(block.lengths[0])].tolist()
                for token in tokens[: limit - len(answer)]:
                    answer.append(token)
                    pending.append(token)
                    if piece := decoder.push(token):
                        pieces.append(piece)
                        yield piece
                ended = bool(block.finished[0])
                # A block that overshoots the limit is dropped: one block length compiles once,
                # and its tokens enter the cache with the end of the turn.
                if len(pending) == len(tokens):
                    logits, cache, pending = block.logits, block.cache, []
            if piece := decoder.flush():
                pieces.append(piece)
                yield piece
        except GeneratorExit:
            if self._conversation is start:
                complete()
            raise
        if self._conversation is not start:
            raise ValueError("the session went on while this answer was read: nothing is kept")
        complete()

    def _feed(
        self, cache: Cache, tokens: list[int], *, end: bool = False
    ) -> tuple[Float[Array, "1 V"], Cache]:
        """Runs tokens piece by piece; at the end of a turn the cache is cut to the budget."""
        evicts = self.policy.scorer is not None
        for start in range(0, max(1, len(tokens)), self.chunk):
            piece = tokens[start : start + self.chunk]
            padded = np.zeros((1, _width(len(piece), self.chunk)), np.int32)
            padded[0, : len(piece)] = piece
            logits, cache = inference.extend(
                self.model,
                cache,
                jnp.asarray(padded),
                jnp.asarray([len(piece)], jnp.int32),
                policy=self.policy,
                budget=self.budget,
                params=self.params,
                interval=1 if end and evicts else None,
            )
        return logits, cache

    def _empty_cache(self) -> Cache:
        model, policy, entries = self.model, self.policy, self.budget
        room = BLOCK if policy.scorer is None else 0
        capacity = sizing.default_capacity(model, policy, entries, self.context, room)
        pages, size = None, self._settings.pages
        if size is not None:
            pages = sizing.default_pages(model, policy, entries, self.context, room, capacity, size)
        return assembly.empty_cache(model, 1, capacity, policy, pages)


def _for_turns(policy: Policy, entries: int, room: int, pinned: int) -> Policy:
    """The policy, evicting while decoding and protecting the first `pinned` positions."""
    if policy.scorer is None:
        return policy
    if pinned >= entries:
        raise ValueError(
            f"budget of {entries} entries per head: the pinned system prompt alone has {pinned} "
            "tokens; allow more, shorten it, or unpin it (pin_system=False)"
        )
    sinks = max(policy.protection.sinks, pinned)
    return dataclasses.replace(
        policy,
        protection=dataclasses.replace(policy.protection, sinks=sinks),
        schedule=dataclasses.replace(policy.schedule, decode_interval=room),
    )


def _width(count: int, chunk: int) -> int:
    """The padded length of a piece: few different ones, so that turns share compilations."""
    width = _NARROWEST
    while width < count:
        width *= 2
    return min(width, max(chunk, count))


def _gone(missing: Any) -> str:
    lacking = missing.any(axis=(0, 1))
    first, last = first_range(lacking)
    heads = missing[:, :, first : last + 1].any(axis=2)
    more = int(lacking.sum()) - (last - first + 1)
    rest = f", and {more} more positions" if more else ""
    return (
        f"positions {first} to {last} are gone from {int(heads.sum())} of {heads.size} heads"
        f"{rest}; allow_missing=True goes on without them"
    )
