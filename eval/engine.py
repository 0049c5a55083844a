"""Every call that the harness makes to kvjax, timed apart from compilation."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kvjax
from eval import environments, haystacks, identity
from eval.config import Config, PolicyConfig
from eval.spread import spread
from eval.stages import Answers, Compressed, Prefilled, Row
from kvjax import decoding, generation, sizing
from kvjax.cache.entries import entry_positions
from kvjax.learned import modules
from kvjax.policies.base import Schedule
from kvjax.policy_arrays import module_directories, policy_params

_QUESTION_STEP = 16
_ROOM_STEP = 64  # tasks whose answers differ little in length share their compilations
_BLOCK = 16  # decode steps between looks at which rows have ended
_CALIBRATION = 1024  # tokens


def build_policies(configs: Sequence[PolicyConfig]) -> dict[str, Any]:
    """Policies by label, the full cache first.

    Each evicts once, after the shared prefill, whatever its published schedule, unless its options
    ask for `decode_interval` (it evicts while decoding too) or `prefill: chunked` (it has a prefill
    of its own, in bounded memory).

    Raises:
      ValueError: an unknown name or option, or a value outside what is allowed.
    """
    built = {"full": kvjax.Policy(name="full", scorer=None)}
    for index, config in enumerate(configs):
        if config.label == "full":
            continue
        options = dict(config.options)
        try:
            policy = kvjax.policy(config.name, **options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"policies[{index}]: {error}") from error
        given = policy.schedule
        schedule = Schedule(
            prefill=given.prefill if "prefill" in options else "whole",
            chunk=given.chunk,
            decode_interval=given.decode_interval if "decode_interval" in options else None,
        )
        policy = dataclasses.replace(policy, schedule=schedule)
        if "replay" in policy.needs and schedule != Schedule(chunk=given.chunk):
            raise ValueError(
                f"policies[{index}]: {config.name} replays a whole prefill: prefill and "
                "decode_interval are not allowed with it"
            )
        built[config.label] = policy
    return built


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The static shapes of a cache; `alone` names a policy that no other can decode beside."""

    capacity: int
    pages: kvjax.Pages | None = None
    alone: str | None = None


class KvjaxEngine:
    """Prefill, compress, answer: for one model and one set of policies.

    Each program is compiled once per shape, ahead of its first timed call; `compilations` counts
    them and `compile_seconds` sums their time. Over several devices the rows of a batch are
    split evenly where their number allows it; the model stands on each.
    """

    def __init__(
        self,
        loaded: Any,
        policies: Mapping[str, Any],
        devices: Sequence[jax.Device] | None = None,
    ):
        self.model, self.tokenizer = loaded
        self.policies = dict(policies)
        self.compilations = 0
        self.compile_seconds = 0.0
        self.model_seconds = 0.0
        self._compiled: dict[Any, Any] = {}
        devices = jax.local_devices() if devices is None else devices
        self._mesh = Mesh(np.asarray(devices), ("data",)) if len(devices) > 1 else None
        if self._mesh is not None:
            self.model = jax.device_put(self.model, NamedSharding(self._mesh, PartitionSpec()))
        # After the model has its place: what is made from its weights lies where they do.
        self.params = {
            label: policy_params(self.model, policy, self._calibration)
            for label, policy in self.policies.items()
        }

    @property
    def context_limit(self) -> int:
        """The most tokens, prompt and answer together, that the model was made for."""
        return self.model.config.max_length

    def bucket(self, length: int) -> int:
        return kvjax.bucket_length(length)

    def room(self, question: int, max_new_tokens: int) -> int:
        needed = _question_bucket(question) + -(-max_new_tokens // _BLOCK) * _BLOCK
        return -(-needed // _ROOM_STEP) * _ROOM_STEP

    def resolve(self, budget: int | float | str, length: int) -> int:
        """Entries per KV head that `budget` allows a prompt of `length` tokens."""
        dtype = jax.tree.leaves(self.model)[0].dtype
        return kvjax.Budget.parse(budget).resolve(length, self.model.config, dtype)

    def layout(self, label: str, budget: int, bucket: int, room: int) -> Layout:
        """Slots per head that this policy needs at `budget`, and `room` tokens more.

        Where heads get uneven shares the cache is paged, so that its bytes follow their sum.
        """
        policy = self.policies[label]
        alone = label if _goes_on(policy) else None
        page = sizing.default_page_size(policy)
        if page is None:
            capacity = sizing.default_capacity(self.model, policy, budget, bucket, room)
            return Layout(capacity=capacity, alone=alone)
        # One head may hold the whole prompt in every such policy, so that all of them can decode
        # side by side; it costs page numbers, not pages.
        capacity = bucket + room
        sizes = (budget, bucket, room, capacity, page)
        pages = sizing.default_pages(self.model, policy, *sizes)
        return Layout(capacity=capacity, pages=pages, alone=alone)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Prefilled:
        """One pass over the prompts that serves every policy and every budget."""
        lengths = tuple(len(prompt) for prompt in prompts)
        bucket = self.bucket(max(lengths))
        tokens = self._spread(_padded(prompts, bucket))
        sizes = self._spread(jnp.asarray(lengths, jnp.int32))
        sharing = tuple(p for p in self.policies.values() if p.schedule.prefill == "whole")
        observe = functools.partial(kvjax.observe, policies=sharing)
        (logits, cache, observations), seconds = self._run(
            "observe", observe, self.model, tokens, sizes
        )
        replay_seconds = 0.0
        if any("replay" in policy.needs for policy in sharing):
            replay = functools.partial(kvjax.replay, tokenizer=self.tokenizer)
            observations, replay_seconds = self._run(
                "replay", replay, self.model, cache, observations, tokens, sizes
            )
        return Prefilled(
            tokens=tokens,
            logits=logits,
            cache=cache,
            observations=observations,
            lengths=lengths,
            bucket=bucket,
            seconds=seconds,
            nbytes=kvjax.nbytes(cache) // len(prompts),
            replay_seconds=replay_seconds,
        )

    def compress(
        self, prefilled: Prefilled, label: str, budgets: Sequence[int], layout: Layout
    ) -> Compressed:
        """The caches that the policy `label` leaves of the prefilled ones."""
        policy = self.policies[label]
        entries = self._spread(jnp.asarray(budgets, jnp.int32))
        static = {"policy": policy, "capacity": layout.capacity, "pages": layout.pages}
        logits = prefilled.logits
        if policy.schedule.prefill == "chunked":
            (logits, cache), seconds = self._run(
                ("prefill", label, layout),
                lambda *given: decoding.prefill_chunked(*given[:-1], params=given[-1], **static),
                self.model,
                prefilled.tokens,
                jnp.asarray(prefilled.lengths, jnp.int32),
                entries,
                self.params[label],
            )
        else:

            def program(
                model: Any, cache: Any, observations: Any, budget: jax.Array, params: Any
            ) -> Any:
                sizes = {"budget": budget, "params": params}
                return kvjax.compress(model, cache, observations, **sizes, **static)

            cache, seconds = self._run(
                ("compress", label, layout),
                program,
                self.model,
                prefilled.cache,
                prefilled.observations,
                entries,
                self.params[label],
            )
        if "replay" in policy.needs:
            seconds += prefilled.replay_seconds
        return Compressed(
            cache=cache,
            logits=logits,
            rows=_measured(cache, prefilled.lengths),
            seconds=seconds,
            evicting=(policy, tuple(budgets), self.params[label]) if _goes_on(policy) else None,
        )

    def answer(
        self,
        prefilled: Prefilled,
        compressed: Sequence[Compressed],
        questions: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> Answers:
        """Asks all rows their questions in one batch, and decodes them greedily.

        With empty questions the first token follows from the prefill's own logits.
        """
        copies, batch = len(compressed), len(questions)
        cache = self._spread(kvjax.stack_rows([one.cache for one in compressed]))
        options: dict[str, Any] = {}
        evicting = ()
        if compressed[0].evicting is not None:
            (policy, budgets, params) = compressed[0].evicting
            options = {"policy": policy}
            evicting = ({"budget": jnp.asarray(budgets, jnp.int32), "params": params},)
        lengths = [len(question) for question in questions]
        if any(lengths):
            padded = _padded(list(questions) * copies, _question_bucket(max(lengths)))

            def ask(model: Any, cache: Any, tokens: Any, sizes: Any, *evicting: Any) -> Any:
                data = evicting[0] if evicting else {}
                return decoding.extend(model, cache, tokens, sizes, **options, **data)

            (logits, cache), question_seconds = self._run(
                ("extend", options.get("policy")),
                ask,
                self.model,
                cache,
                self._spread(padded),
                self._spread(jnp.asarray(lengths * copies, jnp.int32)),
                *evicting,
            )
        else:
            logits = self._spread(jnp.concatenate([one.logits for one in compressed]))
            question_seconds = 0.0
        texts, steps, decode_seconds = self._decode(
            cache, logits, max_new_tokens, options.get("policy"), evicting
        )
        return Answers(
            tokens=[texts[start : start + batch] for start in range(0, copies * batch, batch)],
            question_seconds=question_seconds,
            decode_seconds=decode_seconds,
            steps=steps,
        )

    def _decode(
        self, cache: Any, logits: jax.Array, max_new_tokens: int, policy: Any, evicting: tuple
    ) -> tuple[list[list[int]], int, float]:
        """Greedy tokens of every row, decode steps, and seconds.

        Rows whose answer has ended leave the batch, so that one long answer does not make all
        others go on with it: the batch shrinks to 2^n or 3 * 2^n rows.
        """
        end_tokens = tuple(sorted(self.tokenizer.end_tokens))

        def block(model: Any, cache: Any, logits: Any, finished: Any, *evicting: Any) -> Any:
            data = evicting[0] if evicting else {}
            sizes = {"max_new_tokens": _BLOCK, "end_tokens": end_tokens, "finished": finished}
            return generation.generate(model, cache, logits, policy=policy, **sizes, **data)

        texts: list[list[int]] = [[] for _ in range(logits.shape[0])]
        rows = list(range(len(texts)))  # whose answer each row of the batch holds
        finished, steps, seconds = np.zeros(len(rows), bool), 0, 0.0
        while not finished.all() and steps < max_new_tokens:
            output, spent = self._run(
                ("generate", policy),
                block,
                self.model,
                cache,
                logits,
                self._spread(jnp.asarray(finished)),
                *evicting,
            )
            lengths, tokens = np.asarray(output.lengths), np.asarray(output.tokens)
            for row, own, length in zip(rows, tokens, lengths, strict=True):
                texts[row] += own[:length].tolist()
            steps, seconds = steps + int(lengths.max()), seconds + spent
            overflowed = np.asarray(output.cache.overflowed)
            if overflowed.any():
                raise RuntimeError(f"{int(overflowed.max())} tokens found the cache full")
            cache, logits, finished = output.cache, output.logits, np.array(output.finished)
            going = np.flatnonzero(~finished)
            size = _batch_size(len(going))
            if 0 < size <= 3 * len(rows) // 4:
                # The batch is filled up with rows that have ended.
                kept = np.concatenate([going, np.flatnonzero(finished)[: size - len(going)]])
                (cache, logits, evicting), spent = self._run(
                    "take rows", _taken, cache, logits, evicting, jnp.asarray(kept)
                )
                cache, logits = self._spread(cache), self._spread(logits)
                rows, finished = [rows[i] for i in kept], finished[kept]
                seconds += spent
        return [text[:max_new_tokens] for text in texts], min(steps, max_new_tokens), seconds

    def _calibration(self) -> list[int]:
        return calibration_tokens(self.tokenizer)

    def versions(self) -> dict[str, str]:
        """Of what can change a result."""
        return environments.versions(self.model)

    def identity(self) -> dict[str, str]:
        """Hashes of the model, its tokenizer and the trained modules of the policies."""
        return identity.of_model(self.model, self.tokenizer) | {
            f"policy {label}": " ".join(map(modules.digest, directories))
            for label, policy in self.policies.items()
            if (directories := module_directories(self.model, policy))
        }

    def _spread[T](self, rows: T) -> T:
        """Arrays with their rows over the devices, where the number of rows allows it."""
        if self._mesh is None:
            return rows
        return spread(rows, self._mesh)

    def _run(self, name: Any, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        """The result and the seconds until it is there; compiles on the first call of a shape."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        key = (name, structure, shapes)
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = jax.jit(function).lower(*args).compile()
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - start
        start = time.perf_counter()
        result = jax.block_until_ready(self._compiled[key](*args))
        seconds = time.perf_counter() - start
        self.model_seconds += seconds
        return result, seconds


def _batch_size(rows: int) -> int:
    """The smallest 2^n or 3 * 2^n that holds `rows`: few sizes to compile, little padding."""
    power = 1 << (rows - 1).bit_length() if rows else 0
    return 3 * power // 4 if power >= 4 and rows <= 3 * power // 4 else power


def build(config: Config, loaded: Any) -> KvjaxEngine:
    """An engine for the policies of `config` and what `kvjax.load` returned."""
    return KvjaxEngine(loaded, build_policies(config.policies))


def calibration_tokens(tokenizer: Any) -> list[int]:
    """Tokens for policies that look at a model's queries once, from the end of the sentences.

    Of the haystacks only `sentences` has this text: a sample that starts near its end, as the
    seed draws it, holds a part of it. No other haystack does, nor does a task read from files.
    """
    sentences = haystacks.load("sentences").sentences[-_CALIBRATION:]
    return tokenizer.encode("".join(sentences))[:_CALIBRATION]


def _measured(cache: Any, lengths: Sequence[int]) -> tuple[Row, ...]:
    """Bytes and kept positions of every row."""
    alive = np.asarray(cache.lengths)  # [L, B, K]
    positions = np.asarray(entry_positions(cache))  # [L, B, K, S]
    entries = (cache.keys, cache.values, cache.positions)
    slots = cache.keys.size // cache.head_dim
    entry_nbytes = sum(array.nbytes for array in entries) // slots
    memory_nbytes = kvjax.nbytes(cache.policy_state.memory) // len(lengths)
    rows = []
    for row, length in enumerate(lengths):
        at = positions[:, row].reshape(-1)
        at = at[(at >= 0) & (at < length)]
        rows.append(
            Row(
                nbytes=kvjax.nbytes(cache) // len(lengths),
                alive_nbytes=int(alive[:, row].sum()) * entry_nbytes + memory_nbytes,
                alive=float(alive[:, row].mean()),
                kept=np.bincount(at, minlength=length) / alive[:, row].size,
            )
        )
    return tuple(rows)


def _goes_on(policy: Any) -> bool:
    """Whether the policy has to do with tokens after the prefill: it evicts again, or remembers."""
    return policy.schedule.decode_interval is not None or policy.remembers


def _taken(cache: Any, logits: jax.Array, evicting: tuple, kept: jax.Array) -> Any:
    """The rows `kept` of everything that has rows."""
    data = tuple({**one, "budget": one["budget"][kept]} for one in evicting)
    return kvjax.take_rows(cache, kept), logits[kept], data


def _question_bucket(length: int) -> int:
    return -(-length // _QUESTION_STEP) * _QUESTION_STEP


def _padded(rows: Sequence[Sequence[int]], bucket: int) -> jax.Array:
    padded = np.zeros((len(rows), bucket), np.int32)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return jnp.asarray(padded)
