"""Every call that the harness makes to kvjax, timed apart from compilation."""

from __future__ import annotations

import dataclasses
import functools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from eval.config import Config, PolicyConfig
from eval.stages import Answers, Prefilled, Row
from kvjax import sizing
from kvjax.cache.entries import entry_positions
from kvjax.policies.base import Schedule, Uniform

_QUESTION_STEP = 16
_PAGE = 16
_SCHEDULE_OPTIONS = ("prefill", "chunk", "decode_interval")


def build_policies(configs: Sequence[PolicyConfig]) -> dict[str, Any]:
    """Policies by label, the full cache first; each evicts once, after the shared prefill.

    Raises:
      ValueError: an unknown name or option, or a value outside what is allowed.
    """
    built = {"full": kvjax.Policy(name="full", scorer=None)}
    for index, config in enumerate(configs):
        if config.label == "full":
            continue
        options = dict(config.options)
        if repeated := [name for name in _SCHEDULE_OPTIONS if name in options]:
            raise ValueError(
                f"policies[{index}].{config.name}.{repeated[0]}={options[repeated[0]]!r}: one "
                "prefill serves all policies here, so none can evict during it or while decoding"
            )
        try:
            policy = kvjax.policy(config.name, **options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"policies[{index}]: {error}") from error
        built[config.label] = dataclasses.replace(policy, schedule=Schedule())
    return built


type Layout = tuple[int, kvjax.Pages | None]


class KvjaxEngine:
    """Prefill, compress, answer: for one model and one set of policies.

    Each program is compiled once per shape, ahead of its first timed call; `compilations` counts
    them and `compile_seconds` sums their time.
    """

    def __init__(self, loaded: Any, policies: Mapping[str, Any]):
        self.model, self.tokenizer = loaded
        self.policies = dict(policies)
        self.compilations = 0
        self.compile_seconds = 0.0
        self._compiled: dict[Any, Any] = {}

    @property
    def context_limit(self) -> int:
        """The most tokens, prompt and answer together, that the model was made for."""
        return self.model.config.max_length

    def bucket(self, length: int) -> int:
        return kvjax.bucket_length(length)

    def question_bucket(self, length: int) -> int:
        return -(-length // _QUESTION_STEP) * _QUESTION_STEP

    def resolve(self, budget: int | float | str, length: int) -> int:
        """Entries per KV head that `budget` allows a prompt of `length` tokens."""
        dtype = jax.tree.leaves(self.model)[0].dtype
        return kvjax.Budget.parse(budget).resolve(length, self.model.config, dtype)

    def layout(self, label: str, budget: int, bucket: int, room: int) -> Layout:
        """Slots per head that this policy needs at `budget`, and `room` tokens more.

        Where heads get uneven shares the cache is paged, so that its bytes follow their sum.
        """
        policy = self.policies[label]
        if type(policy.allocator) is Uniform:
            sizes = (budget, bucket, room)
            return sizing.default_capacity(self.model, policy, *sizes), None
        # One head may hold the whole prompt in every such policy, so that all of them can decode
        # side by side; it costs page numbers, not pages.
        capacity = bucket + room
        sizes = (budget, bucket, room, capacity, _PAGE)
        return capacity, sizing.default_pages(self.model, policy, *sizes)

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """One pass over the prompt that serves every policy and every budget."""
        bucket = self.bucket(len(tokens))
        padded, length = _padded(tokens, bucket), _vector(len(tokens))
        observe = functools.partial(kvjax.observe, policies=tuple(self.policies.values()))
        (logits, cache, observations), seconds = self._run(
            "observe", observe, self.model, padded, length
        )
        replay_seconds = 0.0
        if any("replay" in policy.needs for policy in self.policies.values()):
            replay = functools.partial(kvjax.replay, tokenizer=self.tokenizer)
            observations, replay_seconds = self._run(
                "replay", replay, self.model, cache, observations, padded, length
            )
        return Prefilled(
            logits=logits,
            cache=cache,
            observations=observations,
            length=len(tokens),
            bucket=bucket,
            seconds=seconds,
            nbytes=kvjax.nbytes(cache),
            replay_seconds=replay_seconds,
        )

    def compress(self, prefilled: Prefilled, label: str, budget: int, layout: Layout) -> Row:
        """The cache that the policy `label` leaves of the prefilled one."""
        policy = self.policies[label]
        capacity, pages = layout
        compress = functools.partial(kvjax.compress, policy=policy, capacity=capacity, pages=pages)

        def program(model: Any, cache: Any, observations: Any, budget: jax.Array) -> Any:
            return compress(model, cache, observations, budget=budget)

        cache, seconds = self._run(
            ("compress", label, layout),
            program,
            self.model,
            prefilled.cache,
            prefilled.observations,
            _vector(budget),
        )
        lengths = np.asarray(cache.lengths)[:, 0]
        heads = lengths.size
        entries = (cache.keys, cache.values, cache.positions)
        slots = cache.keys.size // cache.head_dim
        entry_nbytes = sum(array.nbytes for array in entries) // slots
        positions = np.asarray(entry_positions(cache))[:, 0].reshape(-1)
        positions = positions[(positions >= 0) & (positions < prefilled.length)]
        kept = np.bincount(positions, minlength=prefilled.length) / heads
        return Row(
            cache=cache,
            seconds=seconds + (prefilled.replay_seconds if "replay" in policy.needs else 0.0),
            nbytes=kvjax.nbytes(cache),
            alive_nbytes=int(lengths.sum()) * entry_nbytes,
            alive=float(lengths.mean()),
            kept=kept,
        )

    def answer(
        self,
        prefilled: Prefilled,
        rows: Sequence[Row],
        question: Sequence[int],
        max_new_tokens: int,
    ) -> Answers:
        """Asks all rows the same question in one batch, and decodes them greedily.

        With an empty question the first token follows from the prefill's own logits.
        """
        count = len(rows)
        cache = kvjax.stack_rows([row.cache for row in rows])
        if question:
            tokens = _padded(question, self.question_bucket(len(question)), rows=count)
            (logits, cache), question_seconds = self._run(
                "extend", kvjax.extend, self.model, cache, tokens, _vector(len(question), count)
            )
        else:
            logits, question_seconds = jnp.repeat(prefilled.logits, count, axis=0), 0.0
        end_tokens = tuple(sorted(self.tokenizer.end_tokens))
        generate = functools.partial(
            kvjax.generate, max_new_tokens=max_new_tokens, end_tokens=end_tokens, key=None
        )
        output, decode_seconds = self._run(
            ("generate", max_new_tokens), generate, self.model, cache, logits
        )
        lengths = np.asarray(output.lengths)
        overflowed = np.asarray(output.cache.overflowed)
        if overflowed.any():
            raise RuntimeError(f"{int(overflowed.max())} tokens found the cache full")
        texts = []
        for row, length in zip(np.asarray(output.tokens), lengths, strict=True):
            ids = row[:length].tolist()
            stop = next((i for i, token in enumerate(ids) if token in end_tokens), len(ids))
            texts.append(ids[:stop])
        return Answers(
            tokens=texts,
            question_seconds=question_seconds,
            decode_seconds=decode_seconds,
            steps=int(lengths.max()),
        )

    def versions(self) -> dict[str, str]:
        """Of what can change a result."""
        device = jax.local_devices()[0]
        return {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
            "kvjax": getattr(kvjax, "__version__", "unknown"),
            "device": f"{device.platform} ({device.device_kind})",
            "dtype": str(jax.tree.leaves(self.model)[0].dtype),
        }

    def _run(self, name: Any, function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        """The result and the seconds until it is there; compiles on the first call of a shape."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (name, structure, shapes)
        if key not in self._compiled:
            start = time.perf_counter()
            self._compiled[key] = jax.jit(function).lower(*args).compile()
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - start
        start = time.perf_counter()
        result = jax.block_until_ready(self._compiled[key](*args))
        return result, time.perf_counter() - start


def build(config: Config, loaded: Any) -> KvjaxEngine:
    """An engine for the policies of `config` and what `kvjax.load` returned."""
    return KvjaxEngine(loaded, build_policies(config.policies))


def _vector(value: int, rows: int = 1) -> jax.Array:
    return jnp.full(rows, value, jnp.int32)


def _padded(tokens: Sequence[int], bucket: int, rows: int = 1) -> jax.Array:
    padded = np.zeros((rows, bucket), np.int32)
    padded[:, : len(tokens)] = tokens
    return jnp.asarray(padded)
