"""`kvjax policies`: what the registry holds."""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax import Policy

DESCRIPTION = "List the eviction methods with their options, or describe one in full."
EXAMPLE = "kvjax policies snapkv"
LINE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="describe this method in full")


def run(arguments: argparse.Namespace) -> None:
    import kvjax

    if arguments.name is not None:
        _describe(arguments.name)
        return
    names = kvjax.policy_names()
    width = max(map(len, names)) + 2
    for name in names:
        indent = " " * width
        summary = _first_sentence(_docstring(name))
        print(_wrapped(summary, f"{name:{width}}", indent))
        if defaults := _defaults(name):
            print(_wrapped(defaults, indent))
        print(f"{_wrapped(_composition(name), indent)}\n")
    print("kvjax policies NAME describes one in full.")


def _describe(name: str) -> None:
    import kvjax

    kvjax.policy(name)  # an unknown name is refused here
    print(f"{name}\n\n{_docstring(name)}\n")
    print(f"options      {_defaults(name) or 'none of its own'}")
    print(f"composition  {_composition(name)}")
    print(
        "every policy takes sinks, recent, prefill, chunk, decode_interval, allocator, remainder"
        " and memory_path"
    )


def _wrapped(text: str, first: str, rest: str | None = None) -> str:
    return textwrap.fill(
        text,
        LINE,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
    )


def _docstring(name: str) -> str:
    from kvjax.policies import registry

    return registry.describe(name)


def _defaults(name: str) -> str:
    """The method's own options with the values they have when not given."""
    import kvjax
    from kvjax.policies import registry

    scorer = kvjax.policy(name).scorer
    found = [(option, getattr(scorer, option, None)) for option in registry.options(name)]
    return ", ".join(option if value is None else f"{option}={value}" for option, value in found)


def _composition(name: str) -> str:
    """Allocator, protection and schedule in words."""
    import kvjax

    policy = kvjax.policy(name)
    if policy.scorer is None:
        return "nothing is evicted"
    allocator = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(policy.allocator).__name__).lower()
    protected = _protected(policy) or "nothing"
    return f"{allocator} budgets; protects {protected}; evicts {_when(policy)}"


def _protected(policy: Policy) -> str:
    sinks, recent = policy.protection.sinks, policy.protection.recent
    share = isinstance(recent, float)
    last = f"the last {recent:.0%} of the budget" if share else f"the last {recent} tokens"
    first = f"the first {sinks} tokens"
    return " and ".join(words for words, is_there in ((first, sinks), (last, recent)) if is_there)


def _when(policy: Policy) -> str:
    schedule = policy.schedule
    when = "after prefill" if schedule.prefill == "whole" else f"every {schedule.chunk} tokens"
    if schedule.decode_interval == 1:
        return f"{when} and with every generated token"
    if schedule.decode_interval is not None:
        return f"{when} and every {schedule.decode_interval} generated tokens"
    return when


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]
