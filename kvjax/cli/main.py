"""Entry point of the `kvjax` command: picks the subcommand and turns errors into one line.

Subcommands are modules of this package with `DESCRIPTION`, `EXAMPLE`, `add_arguments(parser)` and
`run(arguments) -> int | None`. Only the chosen one is imported, and it imports JAX in `run`, so
that help appears at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

COMMANDS = {
    "generate": "answer a prompt from a bounded cache",
    "chat": "talk to a model that remembers within a budget",
    "erase": "take a passage out of a context that was read already",
    "inspect": "show on a page which tokens a policy keeps",
    "eval": "compare policies and budgets on tasks, and write a report",
    "report": "write the report of runs of eval, merged or side by side",
    "train": "train a learned policy for a frozen model",
    "env": "show versions, devices and the kernels that operations take",
    "doctor": "check that a run would work here, or on a pod",
    "policies": "list the eviction methods and their options",
    "convert": "write a checkpoint in another format",
}
EXAMPLE = (
    "kvjax generate --prompt-file book.txt --question 'Who is it?' --policy snapkv --budget 25%"
)


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line like every other error: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = False
    try:
        parser = _parser(arguments)
        parsed = parser.parse_args(arguments)
        debug = parsed.debug
        return _command(parsed.command).run(parsed) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ImportError) as error:  # a package of an extra may be missing
        if debug:
            traceback.print_exc()
        print(f"kvjax: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _parser(arguments: Sequence[str]) -> Parser:
    """The parser for these arguments; commands that they do not name stay empty."""
    parser = Parser(
        prog="kvjax",
        description="Bounded-memory long-context inference in JAX.",
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvjax {_version()}")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=summary)
            continue
        module = _command(name)
        subparser = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(subparser)
    return parser


def _command(name: str) -> Any:
    return importlib.import_module(f"kvjax.cli.{name}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvjax")
    except PackageNotFoundError:
        return "(not installed)"


def _one_line(error: Exception) -> str:
    """The error's message on one line, naming the file where the system reports one."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        message = f"{os.fspath(error.filename)}: {error.strerror}"
    else:
        message = str(error) or type(error).__name__
    return " ".join(message.split())


if __name__ == "__main__":
    sys.exit(main())
