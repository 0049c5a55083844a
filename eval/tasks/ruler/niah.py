"""RULER's needles in a haystack: key-value sentences, some asked for by their keys."""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Iterator, Sequence

from eval.tasks import filling
from eval.tasks.base import Request, Sample
from eval.tasks.needle import word_key

_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    "The special magic {kind} for {query} mentioned in the provided text is",
)
_SEVERAL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n",
    "What are all the special magic {kind}s for {query} mentioned in the provided text?",
    "The special magic {kind}s for {query} mentioned in the provided text are",
)
_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_MAX_NEW_TOKENS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subset:
    """How many needles of which kind; `haystacks` is () where the haystack is more needles."""

    haystacks: tuple[str, ...]
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1  # for each key
    asked: int = 1  # keys


SUBSETS = {
    "niah_single_1": Subset(haystacks=("noise",)),
    "niah_single_2": Subset(haystacks=("prose",)),
    "niah_single_3": Subset(haystacks=("prose",), value="uuid"),
    "niah_multikey_1": Subset(haystacks=("prose",), keys=4),
    "niah_multikey_2": Subset(haystacks=()),
    "niah_multikey_3": Subset(haystacks=(), key="uuid", value="uuid"),
    "niah_multivalue": Subset(haystacks=("prose",), values=4),
    "niah_multiquery": Subset(haystacks=("prose",), keys=4, asked=4),
}


def make(request: Request) -> Sample:
    """One sample of RULER's niah, of the subset that the request names; see `make_needles`."""
    return make_needles(request, SUBSETS[request.subset])


def make_needles(request: Request, subset: Subset) -> Sample:
    """One sample of RULER's niah (scripts/data/synthetic/niah.py), under the name of the request.

    With a depth, the needle asked for, or the first of them, stands at the break nearest to that
    share of the characters. Without one the breaks are drawn as RULER does: see
    `filling.drawn_breaks`. The last sentence or needle that only fills may be cut. `needle_spans`
    holds the needles that are asked for, in their order in the context, `needle_span` the first.

    Raises:
      ValueError: too short a length, or a haystack that contains a key or value.
    """
    length, depth = request.length, request.depth
    haystack = request.haystack if subset.haystacks else None
    kind = haystack.kind if haystack else "needles"
    own_lines = haystack is None or haystack.breaks_at_lines
    task = f"ruler/{request.subset}"
    name = f"{task}/{kind}/{length}" + ("" if depth is None else f"/d{depth:g}")
    name = f"{name}/s{request.seed}"
    rng = random.Random(name)

    used: set[str] = set()
    keys = [_new(subset.key, rng, used) for _ in range(subset.keys)]
    values = {key: [_new(subset.value, rng, used) for _ in range(subset.values)] for key in keys}
    asked = rng.sample(keys, subset.asked)
    answers = [value for key in asked for value in values[key]]
    needles = [_needle(subset, key, value) for key in keys for value in values[key]]
    first = _needle(subset, asked[0], answers[0])
    rng.shuffle(needles)
    place = rng.getrandbits(64)
    stream = haystack.stream(rng) if haystack else _more_needles(subset, rng, used)
    introduction, question, prefix = (
        text.format(kind=subset.value, query=_listed(asked))
        for text in (_ONE if len(answers) == 1 else _SEVERAL)
    )

    def context_of(sentences: Sequence[str]) -> tuple[str, dict[str, list[int]]]:
        at = filling.drawn_breaks(sentences, own_lines, len(needles), place)
        placed = list(zip(at, needles, strict=True))
        if depth is not None:
            there = filling.break_at_depth(sentences, own_lines, depth)
            placed = sorted((there if n == first else i, n) for i, n in placed)
        ordered = [needle for _, needle in placed]
        text, spans = filling.insert(sentences, ordered, [i for i, _ in placed], own_lines)
        spans = filling.shifted(spans, len(introduction))
        return introduction + text, dict(zip(ordered, spans, strict=True))

    def count(sentences: Sequence[str]) -> int:
        return request.count_tokens(context_of(sentences)[0], question, prefix)

    filling.check_room(task, length, count([]))
    cuts = filling.sentence_cuts if haystack else filling.line_cuts
    sentences = filling.fill(stream, count, length, cuts)
    context, spans = context_of(sentences)
    tokens = request.count_tokens(context, question, prefix)
    filling.check_filled(length, tokens)
    for key, own in values.items():
        if context.count(f"for {key} is:") != len(own) or any(context.count(v) != 1 for v in own):
            # One chance in millions with our haystacks; with a user's file it may be a fact of it.
            raise ValueError(f"haystack {kind}: contains the key {key!r} or one of {own}")
    asked_spans = sorted(spans[_needle(subset, key, v)] for key in asked for v in values[key])
    metadata = {
        "keys": asked,
        "needle_span": asked_spans[0],
        "needle_spans": asked_spans,
        "tokens": tokens,
    }
    if haystack:
        metadata["haystack_sha256"] = haystack.sha256
    return Sample(
        id=name,
        task=task,
        haystack=kind,
        seed=request.seed,
        depth=depth,
        length=length,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=tuple(answers),
        max_new_tokens=_MAX_NEW_TOKENS,
        metadata=metadata,
    )


def _needle(subset: Subset, key: str, value: str) -> str:
    return _NEEDLE.format(kind=subset.value, key=key, value=value)


def _more_needles(subset: Subset, rng: random.Random, used: set[str]) -> Iterator[str]:
    while True:
        key, value = _new(subset.key, rng, used), _new(subset.value, rng, used)
        yield _needle(subset, key, value) + "\n"


def _new(kind: str, rng: random.Random, used: set[str]) -> str:
    """A word, number or uuid that is not among `used` yet."""
    while True:
        if kind == "word":
            drawn = word_key(rng)
        elif kind == "number":
            drawn = str(rng.randint(10**6, 10**7 - 1))
        else:
            drawn = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if drawn not in used:
            used.add(drawn)
            return drawn


def _listed(keys: Sequence[str]) -> str:
    return f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
