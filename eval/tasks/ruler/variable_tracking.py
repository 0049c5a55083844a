"""RULER's variable tracking (vt): a chain of assignments, one value, every name that has it."""

from __future__ import annotations

import dataclasses
import itertools
import random
import string
from collections.abc import Sequence

from eval.haystacks import Haystack
from eval.tasks import filling
from eval.tasks.base import Request, Sample

_INTRODUCTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
_ANSWER_PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {number} "
    "variables are assigned the value {value}, they are: "
)
_HOPS = 4
_MAX_NEW_TOKENS = 30
_EXAMPLE_TOKENS = 500


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Names of which the first has the value, and every other one that of the name before it."""

    names: tuple[str, ...]
    value: str
    haystack: Haystack
    place: int

    def text(self, sentences: Sequence[str]) -> tuple[str, list[list[int]]]:
        """The haystack with the assignments in their order, and the spans of these."""
        end = "" if self.haystack.breaks_at_lines else "."
        lines = [f"VAR {self.names[0]} = {self.value}{end}"]
        lines += [
            f"VAR {name} = VAR {before}{end}" for before, name in itertools.pairwise(self.names)
        ]
        own_lines = self.haystack.breaks_at_lines
        at = filling.drawn_breaks(sentences, own_lines, len(lines), self.place)
        text, spans = filling.insert(sentences, lines, at, own_lines)
        return _INTRODUCTION + text, filling.shifted(spans, len(_INTRODUCTION))

    @property
    def question(self) -> str:
        return _QUESTION.format(value=self.value)

    @property
    def answer_prefix(self) -> str:
        return _ANSWER_PREFIX.format(number=len(self.names), value=self.value)


def make(request: Request) -> Sample:
    """One chain of four hops after RULER's one solved example (variable_tracking.py).

    Names have five letters, values five digits. The example is a chain of the same length with
    names of three letters, in as much of the same haystack as 500 tokens hold, whatever the length
    of the sample. In lines (noise) an assignment is a line, in prose a sentence with a full stop.
    The answer prefix ends in a space, as RULER's does, and as the example shows it; it says
    "assigned", as the paper does, where some versions of RULER's code have "assgined". Deviation:
    no space before the line break that ends an assignment in noise.

    Raises:
      ValueError: too short a length, or a haystack that contains an assignment.
    """
    haystack, length = request.haystack, request.length
    name = f"ruler/vt/{haystack.kind}/{length}/s{request.seed}"
    rng = random.Random(name)
    # RULER draws from [10000, 99999).
    value, example_value = (str(v) for v in rng.sample(range(10000, 99999), 2))
    solved = _Chain(_names(3, rng), example_value, haystack, rng.getrandbits(64))
    chain = _Chain(_names(5, rng), value, haystack, rng.getrandbits(64))
    example = _example(solved, rng, request)
    stream = haystack.stream(rng)

    def count(sentences: Sequence[str]) -> int:
        context = example + chain.text(sentences)[0]
        return request.count_tokens(context, chain.question, chain.answer_prefix)

    filling.check_room("ruler/vt", length, count([]))
    sentences = filling.fill(stream, count, length, filling.sentence_cuts)
    text, spans = chain.text(sentences)
    context = example + text
    tokens = request.count_tokens(context, chain.question, chain.answer_prefix)
    filling.check_filled(length, tokens)
    if context.count("VAR ") != 2 * (2 * _HOPS + 1):
        raise ValueError(f"haystack {haystack.kind}: contains 'VAR ', as the assignments do")
    spans = filling.shifted(spans, len(example))
    return Sample(
        id=name,
        task="ruler/vt",
        haystack=haystack.kind,
        seed=request.seed,
        depth=None,
        length=length,
        context=context,
        question=chain.question,
        answer_prefix=chain.answer_prefix,
        answers=chain.names,
        max_new_tokens=_MAX_NEW_TOKENS,
        metadata={
            "value": value,
            "needle_span": spans[0],
            "needle_spans": spans,
            "tokens": tokens,
            "haystack_sha256": haystack.sha256,
        },
    )


def _example(chain: _Chain, rng: random.Random, request: Request) -> str:
    """The solved example with the empty line after it."""
    start = rng.getrandbits(64)
    empty = request.count_tokens("", "", "")

    def solved(number: int) -> str:
        stream = chain.haystack.stream(random.Random(start))
        text, _ = chain.text([next(stream) for _ in range(number)])
        return f"{text}\n{chain.question} {chain.answer_prefix} {' '.join(chain.names)}\n\n"

    number = filling.most(
        lambda n: request.count_tokens(solved(n), "", "") - empty, _EXAMPLE_TOKENS
    )
    return solved(number)


def _names(letters: int, rng: random.Random) -> tuple[str, ...]:
    """Different names for one chain."""
    names: dict[str, None] = {}
    while len(names) < _HOPS + 1:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return tuple(names)
