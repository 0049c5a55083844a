"""`kvjax chat`: a conversation in the terminal, remembered within a budget."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvjax.cli.options import PAGES, budget_of, pages_of, params_of, policy_of

if TYPE_CHECKING:
    from kvjax import Policy, Sampling
    from kvjax.session import Session

DESCRIPTION = """\
Talk to a model whose memory of the conversation never exceeds a budget. A line is a turn; a line
that begins with / is a command, see /help. Answers go to standard output, the state of the cache
after each turn to standard error. Lines may also be piped in."""
EXAMPLE = """\
kvjax chat --policy snapkv --budget 512
  kvjax chat --policy keydiff --budget 16MiB --system "Answer in one sentence."
  printf 'My name is Ada.\\nWhat is my name?\\n' | kvjax chat --policy snapkv --budget 256"""
HELP = """\
/save FILE     write the conversation and its cache
/load FILE     go on with a saved one (same model and policy)
/fork          go on in a copy; /fork N goes to branch N
/rollback N    take back the last N turns
/reset         forget everything
/quit          leave (as does end of input)
Ctrl-C         ends an answer early; what was shown is kept"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="M", help="name, path or hub id")
    add("--policy", default="full", metavar="P", help="see kvjax policies (default: full)")
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the policy, such as window=64; may be repeated",
    )
    add(
        "--budget",
        metavar="B",
        help="entries per head after each turn: tokens (256), a fraction of the context "
        "(0.25 or 25%%), or bytes (64MiB)",
    )
    add("--room", type=int, metavar="N", help="entries above the budget while a turn goes on")
    add("--context", type=int, metavar="N", help="tokens to see in all; default the model's")
    add("--chunk", type=int, metavar="N", help="tokens of a long turn run at a time")
    add("--pages", type=int, metavar="N", help=PAGES)
    add("--system", metavar="TEXT", help="the system prompt, never evicted")
    add("--unpinned", action="store_true", help="the system prompt may be evicted")
    add("--load", metavar="FILE", help="go on with a saved conversation")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="per answer; default: 256")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="0 keeps all (default)")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all (default)")
    add("--seed", type=int, default=0, help="of the sampling; default: 0")


def run(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens}: allowed are integers >= 1")
    if arguments.system is not None and not arguments.system.strip():
        raise ValueError("--system: it is empty; leave it out or give any text")

    import kvjax
    from kvjax.session import Session

    sampling = kvjax.Sampling(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p
    )
    policy = policy_of(arguments.policy, arguments.option)
    pages = pages_of(arguments.pages, policy)
    budget = budget_of(arguments.budget, [policy])
    model, tokenizer = kvjax.load(arguments.model)
    if tokenizer is None:
        raise ValueError(f"{arguments.model}: no tokenizer beside the weights (tokenizer.json)")
    session = Session(
        model,
        tokenizer,
        policy=policy,
        budget=budget,
        room=arguments.room,
        context=arguments.context,
        chunk=arguments.chunk,
        system=arguments.system,
        pin_system=not arguments.unpinned,
        pages=pages,
        params=params_of(model, policy, tokenizer),
        seed=arguments.seed,
    )
    chat = Chat(session, policy, sampling, arguments.max_new_tokens)
    if arguments.load is not None:
        chat.load(arguments.load)
    chat.talk()


class Chat:
    """The loop: one line in, one answer out."""

    def __init__(
        self, session: Session, policy: Policy, sampling: Sampling, max_new_tokens: int
    ) -> None:
        self.branches, self.branch = [session], 0
        self.policy, self.sampling, self.max_new_tokens = policy, sampling, max_new_tokens
        self.commands: dict[str, Callable[[str], bool | None]] = {
            "/help": self.help,
            "/save": self.save,
            "/load": self.load,
            "/fork": self.fork,
            "/rollback": self.rollback,
            "/reset": self.reset,
            "/quit": lambda _: True,
        }

    @property
    def session(self) -> Session:
        return self.branches[self.branch]

    def talk(self) -> None:
        """Until /quit or the end of input; only at a terminal do mistakes not end it."""
        interactive = sys.stdin.isatty()
        if interactive:
            _note("/help lists the commands")
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() then has editing and history
        for line in _lines(interactive):
            try:
                if line.startswith("/"):
                    if self.command(line):
                        return
                elif line.strip():
                    self.say(line)
            except (ValueError, OSError) as error:
                if not interactive:
                    raise
                _note(f"error: {' '.join(str(error).split())}")

    def say(self, text: str) -> None:
        """One turn, streamed; an interrupt ends the answer and keeps what was shown."""
        answer = self.session.stream(
            text, max_new_tokens=self.max_new_tokens, sampling=self.sampling
        )
        with _interrupts() as interrupted:
            for piece in answer:
                print(piece, end="", flush=True)
                if interrupted():
                    answer.close()
        print(flush=True)
        self.status()

    def command(self, line: str) -> bool | None:
        """Runs a command; true to leave."""
        name, _, rest = line.strip().partition(" ")
        if name not in self.commands:
            allowed = ", ".join(self.commands)
            raise ValueError(f"unknown command {name!r}; allowed: {allowed}")
        return self.commands[name](rest.strip())

    def help(self, _: str) -> None:
        _note(HELP)

    def save(self, rest: str) -> None:
        if not rest:
            raise ValueError("/save: name a file")
        _note(f"saved {self.session.save(rest)}")

    def load(self, rest: str) -> None:
        if not rest:
            raise ValueError("/load: name a file")
        now = self.session
        self.branches[self.branch] = now.load(
            rest, now.model, now.tokenizer, self.policy, params=now.params
        )
        self.status()

    def fork(self, rest: str) -> None:
        if rest:
            self.branch = _count("/fork", rest, len(self.branches)) - 1
        else:
            self.branches.append(self.session.fork())
            self.branch = len(self.branches) - 1
        _note(f"branch {self.branch + 1} of {len(self.branches)}")
        self.status()

    def rollback(self, rest: str) -> None:
        turns = self.session.turns
        if not turns:
            raise ValueError("/rollback: there is no turn to take back")
        count = _count("/rollback", rest or "1", len(turns))
        position = turns[-count].start
        missing = self.session.rollback(position, allow_missing=True)
        if missing.any():
            _note(
                f"of the {position} tokens before, {int(missing.min())} to {int(missing.max())} "
                "are gone from each head for good"
            )
        self.status()

    def reset(self, _: str) -> None:
        self.session.reset()
        self.status()

    def status(self) -> None:
        now = self.session
        limit = "" if now.policy.scorer is None else f" of {now.budget:,}"
        _note(
            f"[turn {len(now.turns)} | {now.slots:,}{limit} entries per head | "
            f"{now.nbytes / 2**20:.1f} MiB | {now.tokens_seen:,} of {now.context:,} tokens seen]"
        )


def _lines(interactive: bool) -> Iterator[str]:
    while True:
        try:
            line = input("> ") if interactive else sys.stdin.readline()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            _note("\n/quit leaves")
            continue
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input: not UTF-8 text ({error.reason})") from error
        if not interactive and not line:
            return
        yield line.rstrip("\n")


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, so that it never strikes inside a computation; the second raises."""
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _count(command: str, text: str, largest: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= largest:
        raise ValueError(f"{command} {text}: allowed are 1 to {largest}")
    return int(text)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
