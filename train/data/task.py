"""Samples of evaluation's generated tasks with their answers, made as they are asked for.

A prompt is the one that evaluation puts before the model: same template, same tokens. Its seed is
none of evaluation's, which count up from a config's `seed`, a small number: here they start at
FIRST_SEED. A sample's keys, values and haystack follow from its seed, length and place, so that no
context is one that evaluation asks about.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from eval import haystacks
from eval.haystacks import Haystack
from eval.prompt import Prompter, Tokenizer
from eval.tasks import TASKS
from eval.tasks.base import CountTokens, Request, Sample
from eval.tasks.ruler import niah, question_answering
from train.data.answers import answer_text
from train.data.config import TaskConfig
from train.data.counting import prompt_counter
from train.data.examples import Example, example
from train.data.turns import end_of_turn

FIRST_SEED = 10**9
SAMPLES = 10**9

_ATTEMPTS = 16
_PROBES = 4


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What one sample is made of, apart from its random numbers."""

    subset: str
    haystack: Haystack | None
    longest: int  # tokens of a prompt


class TaskSource:
    """A sample by its index, of SAMPLES different ones.

    Subset, haystack and the prompt's length are drawn evenly; for needle the depth is too, in the
    config's range, for ruler the task draws it. `most` is the tokens that prompt, answer and end of
    turn may take together: where the longest prompts leave no room for their answer, the range of
    lengths ends earlier. A draw that cannot be made is drawn again.

    Raises:
      ValueError: lengths that a subset cannot be made with, or that exceed `most`; a haystack's or
        a questions' file that cannot be read.
    """

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer, most: int):
        self._config = config
        self._most = most
        self._prompter = Prompter(tokenizer)
        self._end = end_of_turn(tokenizer)
        self._count: CountTokens = self._prompter.count
        low, high = config.lengths
        if high > most:
            raise ValueError(
                f"lengths=[{low}, {high}]: rows have {most} tokens; allowed are lengths <= {most}"
            )
        given = _kinds(config)
        probes = [[self._probes(kind) for kind in kinds] for kinds in given]
        self._kinds = [
            [self._with_room(kind, samples) for kind, samples in zip(*both, strict=True)]
            for both in zip(given, probes, strict=True)
        ]
        every = [sample for kinds in probes for samples in kinds for sample in samples]
        self._count = prompt_counter(self._prompter, every)
        texts = [k.haystack.sha256[:16] for kinds in given for k in kinds if k.haystack]
        if config.path is not None and Path(config.path).is_file():
            texts.append(hashlib.sha256(Path(config.path).read_bytes()).hexdigest()[:16])
        described = dataclasses.replace(config, weight=1.0, path=None, haystacks=())
        self.identity = f"{described} on {', '.join(texts) or 'its own text'}, {most}"

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Example:
        return self._drawn(index)[1]

    def sample(self, index: int) -> Sample:
        """The sample itself."""
        return self._drawn(index)[0]

    def _drawn(self, index: int) -> tuple[Sample, Example]:
        problem = ""
        drawn = random.Random(f"kind/{index}")
        kind = drawn.choice(drawn.choice(self._kinds))
        for attempt in range(_ATTEMPTS):
            seed = FIRST_SEED + attempt * SAMPLES + index
            rng = random.Random(f"train/{seed}")
            length = rng.randint(self._config.lengths[0], kind.longest)
            least, most = self._config.depths
            depth = round(least + (most - least) * rng.random(), 3)
            try:
                sample = self._make(kind, length, depth, seed)
            except ValueError as error:
                problem = str(error)
                continue
            found = self._example(sample)
            if len(found["tokens"]) <= self._most:
                return sample, found
            problem = f"prompt and answer have {len(found['tokens'])} tokens, rows {self._most}"
        low, high = self._config.lengths
        raise ValueError(
            f"lengths=[{low}, {high}]: sample {index} was not made in {_ATTEMPTS} draws: {problem}"
        )

    def _make(self, kind: _Kind, length: int, depth: float, seed: int) -> Sample:
        config, task = self._config, TASKS[self._config.task]
        request = Request(
            subset=kind.subset,
            haystack=kind.haystack,
            length=length,
            depth=depth if task.depths else None,
            seed=seed,
            count_tokens=self._count,
            path=None if config.path is None else Path(config.path),
        )
        if config.keys > 1:
            several = dataclasses.replace(niah.SUBSETS["niah_multikey_1"], keys=config.keys)
            named = dataclasses.replace(request, subset="niah_multikey_1")
            return niah.make_needles(named, several)
        assert task.make is not None
        return task.make(request)

    def _example(self, sample: Sample) -> Example:
        prompt = self._prompter.prompt(dataclasses.replace(sample, metadata={}))
        tokens = prompt.prefill + prompt.question
        answer = self._answer(sample)
        start = 0 if self._config.labels == "all" else len(tokens)
        whole = tokens + answer
        return example([(whole, start, len(whole))])

    def _answer(self, sample: Sample) -> list[int]:
        return [*self._prompter.tokenizer.encode(answer_text(sample)), self._end]

    def _probes(self, kind: _Kind) -> list[Sample]:
        """Samples of both ends of the range; refuses a range that begins too low."""
        found: list[Sample] = []
        problem: ValueError | None = None
        for length in self._config.lengths:
            for number in range(_PROBES):
                try:
                    found.append(self._make(kind, length, 0.5, FIRST_SEED + number))
                    break
                except ValueError as error:
                    problem = error
            else:
                low, high = self._config.lengths
                raise ValueError(f"lengths=[{low}, {high}]: {problem}") from problem
        return found

    def _with_room(self, kind: _Kind, probes: Sequence[Sample]) -> _Kind:
        """The kind with its prompts as long as leaves an answer its room."""
        low, high = self._config.lengths
        answer = max(len(self._answer(sample)) for sample in probes)
        if low + answer > self._most:
            raise ValueError(
                f"lengths=[{low}, {high}]: the answers of {probes[0].task} have {answer} tokens "
                f"and rows {self._most}; allowed are lengths <= {self._most - answer}"
            )
        return dataclasses.replace(kind, longest=min(high, self._most - answer))


def _kinds(config: TaskConfig) -> list[list[_Kind]]:
    """For every subset, each haystack it is made with."""
    task = TASKS[config.task]
    free = [s for s in task.subsets if config.path or s not in question_answering.FORMATS]
    found = []
    for subset in config.subsets or free or ("",):
        own = task.haystacks(subset)
        names = (config.haystacks or own) if own else (None,)
        stacks = [None if name is None else haystacks.load(name) for name in names]
        found.append([_Kind(subset, stack, config.lengths[1]) for stack in stacks])
    return found
