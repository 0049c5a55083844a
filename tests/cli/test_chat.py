"""`kvjax chat` with piped input: turns, commands, and mistakes that end it."""

from __future__ import annotations

import io
import os
import signal

import pytest

from kvjax.session import Session

SETTINGS = ("--policy", "knorm", "--budget", "40", "--room", "16", "--max-new-tokens", "5")


@pytest.fixture
def chat(run, folder, monkeypatch):
    def call(lines: str, *arguments: object):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return run("chat", "--model", folder, *SETTINGS, *arguments)

    return call


def states(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("[turn")]


def test_a_line_is_a_turn_and_its_state_is_told(chat):
    ran = chat("hello\n\nand then?\n")
    assert ran.status == 0
    assert len(ran.out.splitlines()) >= 2
    first, second = states(ran.err)
    assert first.startswith("[turn 1 | ")
    assert second.startswith("[turn 2 | 40 of 40 entries per head | ")
    assert "tokens seen]" in second


def test_save_load_fork_rollback_and_reset(chat, tmp_path):
    saved = tmp_path / "talk"
    lines = ["hello", f"/save {saved}", "more", "/fork", "/rollback", "/fork 1", "/reset"]
    lines += [f"/load {saved}", "/help", "/quit", "never said"]
    ran = chat("\n".join(lines))
    assert ran.status == 0
    turns = [int(line.split()[1]) for line in states(ran.err)]
    assert turns == [1, 2, 2, 1, 2, 0, 1]
    assert "branch 2 of 2" in ran.err
    assert "/rollback N" in ran.err
    again = chat("", "--load", saved)
    assert [line.split()[1] for line in states(again.err)] == ["1"]


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ("/what\n", "'/what'; allowed: /help"),
        ("/rollback\n", "no turn"),
        ("/fork 2\n", "/fork 2: allowed are 1 to 1"),
        ("/save\n", "name a file"),
        ("/load nowhere\n", "nowhere"),
    ],
)
def test_a_wrong_line_ends_piped_input(chat, lines, part):
    ran = chat(lines + "hello\n")
    assert (ran.status, ran.out) == (2, "")
    assert part in ran.err
    assert ran.err.count("\n") == 1


def test_an_interrupt_ends_the_answer_and_keeps_it(chat, monkeypatch):
    pieces = []
    stream = Session.stream
    handler = signal.getsignal(signal.SIGINT)

    def interrupted(self, *arguments, **options):
        for piece in stream(self, *arguments, **options):
            if not pieces:
                os.kill(os.getpid(), signal.SIGINT)
            pieces.append(piece)
            yield piece

    monkeypatch.setattr(Session, "stream", interrupted)
    ran = chat("hello\n", "--max-new-tokens", "200")
    assert ran.status == 0
    assert len(pieces) == 1
    assert states(ran.err)[0].startswith("[turn 1 | ")
    assert signal.getsignal(signal.SIGINT) is handler


REFUSED = {
    "no budget": (("--policy", "knorm"), "--budget"),
    "unknown policy": (("--policy", "norm", "--budget", "9"), "'norm'"),
    "budget of zero": (("--policy", "knorm", "--budget", "0"), "0"),
    "no new tokens": (("--max-new-tokens", "0"), ">= 1"),
    "empty system prompt": (("--system", " "), "--system"),
    "negative pages": (("--pages", "-1"), "--pages -1"),
    "missing model": (("--model", "./nowhere"), "./nowhere"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_one_line_and_status_2(run, name):
    arguments, part = REFUSED[name]
    ran = run("chat", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert part in ran.err
    assert ran.err.count("\n") == 1
