"""The record of a conversation: which text stands at which positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One question with its answer; positions count every token the session has seen."""

    text: str
    answer: str
    start: int  # of the question, with its part of the template
    answer_start: int
    end: int  # one behind the last token, the end of the answer's template included
    complete: bool = True  # False where a rollback has cut it; its texts are then longer than it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a session has seen so far."""

    tokens_seen: int = 0
    preface: int = 0  # tokens before the first turn: the system prompt
    turns: tuple[Turn, ...] = ()
    unclosed: bool = False  # the last tokens are a message without its end
    tokens: tuple[int, ...] = ()  # the id at every position

    def with_turn(
        self,
        text: str,
        answer: str,
        *,
        preface: Sequence[int],
        question: Sequence[int],
        answered: Sequence[int],
    ) -> Conversation:
        """One more turn: tokens of a preface before it, of the question, and of the answer."""
        start = self.tokens_seen + len(preface)
        answer_start = start + len(question)
        end = answer_start + len(answered)
        turn = Turn(text=text, answer=answer, start=start, answer_start=answer_start, end=end)
        return Conversation(
            tokens_seen=end,
            preface=self.preface + len(preface),
            turns=(*self.turns, turn),
            tokens=(*self.tokens, *preface, *question, *answered),
        )

    def without(self, start: int, stop: int) -> Conversation:
        """The conversation with the tokens of a span taken out and what follows moved up.

        The turns keep their texts, which are a record of what was said.
        """

        def moved(position: int) -> int:
            return position - min(max(position - start, 0), stop - start)

        turns = [
            dataclasses.replace(
                turn,
                start=moved(turn.start),
                answer_start=moved(turn.answer_start),
                end=moved(turn.end),
            )
            for turn in self.turns
        ]
        return dataclasses.replace(
            self,
            tokens_seen=moved(self.tokens_seen),
            preface=moved(self.preface),
            turns=tuple(turns),
            tokens=self.tokens[:start] + self.tokens[stop:],
        )

    def cut(self, to_position: int) -> Conversation:
        """The conversation before `to_position`; a turn that it cuts is marked incomplete."""
        if to_position >= self.tokens_seen:
            return self
        turns = [turn for turn in self.turns if turn.start < to_position]
        ends = {0, self.preface, *(turn.end for turn in turns if turn.complete)}
        if turns and turns[-1].end > to_position:
            last = turns[-1]
            turns[-1] = dataclasses.replace(
                last,
                answer=last.answer if to_position > last.answer_start else "",
                answer_start=min(last.answer_start, to_position),
                end=to_position,
                complete=False,
            )
        return Conversation(
            tokens_seen=to_position,
            preface=min(self.preface, to_position),
            turns=tuple(turns),
            unclosed=to_position not in ends,
            tokens=self.tokens[:to_position],
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Conversation:
        """Inverse of `dataclasses.asdict`, after a trip through JSON."""
        turns = tuple(Turn(**turn) for turn in raw["turns"])
        return cls(**{**raw, "turns": turns, "tokens": tuple(raw.get("tokens", ()))})
