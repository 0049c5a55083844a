"""`kvjax policies`: what the registry holds."""

from __future__ import annotations

import argparse
import re
import textwrap

DESCRIPTION = "List the eviction methods with their options, or describe one in full."
EXAMPLE = "kvjax policies snapkv"


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
        summary = textwrap.fill(
            f"{name:{width}}{_first_sentence(_docstring(name))}", 100, subsequent_indent=indent
        )
        print(summary)
        if defaults := _defaults(name):
            print(f"{indent}{defaults}")
        print(f"{indent}{_composition(name)}\n")
    print("kvjax policies NAME describes one in full.")


def _describe(name: str) -> None:
    import kvjax

    kvjax.policy(name)  # an unknown name is refused here
    print(f"{name}\n\n{_docstring(name)}\n")
    print(f"options      {_defaults(name) or 'none of its own'}")
    print(f"composition  {_composition(name)}")
    print("every policy takes sinks, recent, prefill, chunk and decode_interval")


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
    protection, schedule = policy.protection, policy.schedule
    recent = protection.recent
    share = f"{recent:.0%} of the budget" if isinstance(recent, float) else f"{recent} tokens"
    when = "after prefill" if schedule.prefill == "whole" else f"every {schedule.chunk} tokens"
    if schedule.decode_interval is not None:
        when += f" and every {schedule.decode_interval} generated tokens"
    allocator = type(policy.allocator).__name__.lower()
    return (
        f"{allocator} allocation; protects {protection.sinks} sinks and the last {share}; "
        f"evicts {when}"
    )


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]
