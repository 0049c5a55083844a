"""Names of methods: one decorator registers a scorer class or a function that builds a policy."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Literal

from kvjax.policies.base import Allocator, Policy, Protection, Remainder, Schedule, Scorer

_REGISTRY: dict[str, Callable[..., Scorer | Policy]] = {}


def register[F: Callable[..., Scorer | Policy]](name: str) -> Callable[[F], F]:
    """Makes `policy(name, **options)` build what the decorated class or function returns."""

    def add(factory: F) -> F:
        if name in _REGISTRY:
            raise ValueError(f"policy {name!r} is registered twice")
        _REGISTRY[name] = factory
        return factory

    return add


def policy_names() -> tuple[str, ...]:
    """Every registered name, sorted."""
    return tuple(sorted(_REGISTRY))


def describe(name: str) -> str:
    """The docstring of a registered method."""
    return inspect.cleandoc(_factory(name).__doc__ or "")


def options(name: str) -> tuple[str, ...]:
    """The keyword options a method takes, beside those every policy takes."""
    return tuple(inspect.signature(_factory(name)).parameters)


def policy(
    name: str,
    *,
    sinks: int | None = None,
    recent: int | float | None = None,
    prefill: Literal["whole", "chunked"] | None = None,
    chunk: int | None = None,
    decode_interval: int | None = None,
    allocator: Allocator | str | None = None,
    remainder: Remainder | str | None = None,
    memory_path: str | None = None,
    **method_options: object,
) -> Policy:
    """The named method with its published defaults, changed by the given options.

    Args:
      name: one of `policy_names()`.
      sinks, recent: override the protection.
      prefill, chunk, decode_interval: override the schedule; `decode_interval=0` never evicts
        while decoding.
      allocator: how the budget is split: an `Allocator`, or "uniform", "pyramid", "ada", "cake"
        or "global" with its defaults.
      remainder: what becomes of evicted entries: a `Remainder`, or "drop", "cam", "pivot" or
        "memory".
      memory_path: the directory of a trained memory; the remainder then has its settings. Default:
        the one that ships for the policy and the backbone.
      **method_options: fields of the scorer, e.g. `window=64` for SnapKV.

    Raises:
      ValueError: unknown name or option, or a value outside what is allowed.
    """
    factory = _factory(name)
    allowed = options(name)
    for option in method_options:
        if option not in allowed:
            known = ", ".join((*allowed, *_COMMON))
            raise ValueError(f"policy {name!r} has no option {option!r}; allowed: {known}")
    built = factory(**method_options)
    if isinstance(built, Scorer):
        built = Policy(
            name=name,
            scorer=built,
            protection=built.protection(),
            allocator=built.allocator(),
            schedule=built.schedule(),
        )
    interval = None if decode_interval == 0 else decode_interval
    return dataclasses.replace(
        built,
        protection=Protection(
            sinks=built.protection.sinks if sinks is None else sinks,
            recent=built.protection.recent if recent is None else recent,
        ),
        schedule=Schedule(
            prefill=built.schedule.prefill if prefill is None else prefill,
            chunk=built.schedule.chunk if chunk is None else chunk,
            decode_interval=(
                built.schedule.decode_interval if decode_interval is None else interval
            ),
        ),
        allocator=built.allocator if allocator is None else _allocator(allocator),
        remainder=_with_path(
            built.remainder if remainder is None else _remainder(remainder), memory_path
        ),
    )


_COMMON = (
    "sinks", "recent", "prefill", "chunk", "decode_interval", "allocator", "remainder",
    "memory_path",
)  # fmt: skip


def _allocator(value: Allocator | str) -> Allocator:
    from kvjax.policies import allocators  # it builds on methods that this module registers

    known = {
        "uniform": allocators.Uniform,
        "pyramid": allocators.Pyramid,
        "ada": allocators.Ada,
        "cake": allocators.Cake,
        "global": allocators.Global,
    }
    return value if isinstance(value, Allocator) else _named("allocator", value, known)()


def _remainder(value: Remainder | str) -> Remainder:
    from kvjax.policies import latent_memory, value_merging

    known = {
        "drop": Remainder,
        "cam": value_merging.CacheMerging,
        "pivot": value_merging.PivotMerging,
        "memory": latent_memory.LatentMemory,
    }
    return value if isinstance(value, Remainder) else _named("remainder", value, known)()


def _with_path(remainder: Remainder, path: str | None) -> Remainder:
    from kvjax.policies.latent_memory import LatentMemory

    if path is None:
        return remainder
    if not isinstance(remainder, LatentMemory):
        raise ValueError(
            f"memory_path={path!r}: allowed with remainder='memory' or a policy that has one"
        )
    return LatentMemory.trained(path)


def _named[T](what: str, name: object, known: dict[str, T]) -> T:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{what} {name!r}: allowed are {', '.join(known)}")
    return known[name]


def _factory(name: str) -> Callable[..., Scorer | Policy]:
    if name not in _REGISTRY:
        raise ValueError(f"unknown policy {name!r}; allowed: {', '.join(policy_names())}")
    return _REGISTRY[name]
