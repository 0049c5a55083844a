"""Sources mixed, shuffled, packed into rows and batched, with a state to go on from."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from eval.prompt import Tokenizer
from train.data import examples, order
from train.data.chat import ChatSource
from train.data.config import ChatConfig, ErasedConfig, SourceConfig, TaskConfig, TextConfig
from train.data.erasing import ErasingSource
from train.data.examples import Piece, Source
from train.data.task import TaskSource
from train.data.text import TextSource

_VERSION = 1
# Rows that are filled side by side: more of them leave less padding.
_OPEN_ROWS = 16
_EMPTY = 1000


class Batch(TypedDict):
    """B rows of T tokens, each row holding examples one after the other, then padding.

    `segments` counts a row's examples from 0 and is -1 in the padding. `positions` starts at 0 in
    every segment. `labels[t]` says that token t + 1 is to be predicted from token t. Where spans
    are to be erased, `parts` says what a token belongs to (`train.data.erasing`).
    """

    tokens: np.ndarray  # [B, T] int32
    segments: np.ndarray  # [B, T] int32
    positions: np.ndarray  # [B, T] int32
    labels: np.ndarray  # [B, T] bool
    parts: NotRequired[np.ndarray]  # [B, T] int32


class Batches:
    """Endless batches. `get_state()` is plain JSON; after `set_state` of it the same ones follow.

    The state is that of one process: each process keeps its own. Batches that are made ahead in
    the background are not counted as given. `close()` ends the background thread.
    """

    def __init__(self, iterator: Any, data: Mapping[str, Any]):
        self._iterator = iterator
        self._data = json.loads(json.dumps(data))
        self.rows = np.arange(data["batch"])  # all of a batch
        self.close = weakref.finalize(self, _close, iterator)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where the next batch starts, and of which data."""
        state = {"version": _VERSION, "data": self._data, "iterator": self._iterator.get_state()}
        return json.loads(json.dumps(state))

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the last batch given when the state was got, in this process or another.

        Raises:
          ValueError: a state of other data, or of another process.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise ValueError(f"state of the data: version {_VERSION} of get_state is needed")
        for name, value in self._data.items():
            if state["data"].get(name) != value:
                raise ValueError(
                    f"state of the data: {name} was {state['data'].get(name)!r} and is {value!r}; "
                    "the same is needed to go on"
                )
        self._iterator.set_state(state["iterator"])


def build(
    sources: Sequence[SourceConfig],
    tokenizer: Tokenizer,
    *,
    length: int,
    batch: int,
    seed: int,
    process: tuple[int, int] = (0, 1),
    prefetch: int = 2,
) -> Batches:
    """Endless batches of `batch` rows of `length` tokens for process i of n, `process=(i, n)`.

    Sources are mixed by their weights, each in an order drawn from `seed`, anew in every epoch of
    its own. Process i gets every n-th example of each source. Up to `prefetch` batches are made
    ahead in a background thread; 0 for none.

    Raises:
      ValueError: a number outside what is allowed, or, named as "data[0]: ...", a source that
        cannot be read.
      ImportError: without grain, or parquet without pyarrow.
    """
    for name, value, least in (
        ("length", length, 2),
        ("batch", batch, 1),
        ("seed", seed, 0),
        ("prefetch", prefetch, 0),
    ):
        if value < least:
            raise ValueError(f"{name}={value}: allowed: integers >= {least}")
    index, count = process
    if not 0 <= index < count:
        raise ValueError(f"process={process}: allowed: (i, n) with 0 <= i < n")
    if not sources:
        raise ValueError("data: has no sources; at least one is needed")
    erasing = {isinstance(config, ErasedConfig) for config in sources}
    if len(erasing) > 1:
        raise ValueError("data: sources with `erase` stand beside others; allowed is either kind")
    opened = [_opened(i, config, tokenizer, length) for i, config in enumerate(sources)]
    seeds = np.random.SeedSequence(seed).generate_state(len(sources) + 1)
    iterator = _dataset(
        opened,
        sources,
        seeds=[int(s) for s in seeds],
        length=length,
        batch=batch,
        process=process,
        prefetch=prefetch,
    ).__iter__()
    data = {
        "sources": [source.identity for source in opened],
        "weights": [config.weight for config in sources],
        "long": [_long(config) for config in sources],
        "tokenizer": str(getattr(tokenizer, "fingerprint", "")),
        "length": length,
        "batch": batch,
        "seed": seed,
        "process": list(process),
    }
    return Batches(iterator, data)


def open_source(config: SourceConfig, tokenizer: Tokenizer, length: int) -> Source:
    """The source that a config describes, for rows of `length` tokens; errors as in `build`."""
    if isinstance(config, TextConfig):
        return TextSource(config, tokenizer)
    if isinstance(config, ChatConfig):
        return ChatSource(config, tokenizer)
    if isinstance(config, ErasedConfig):
        return ErasingSource(config, tokenizer, length)
    return TaskSource(config, tokenizer, length)


def _opened(number: int, config: SourceConfig, tokenizer: Tokenizer, length: int) -> Source:
    try:
        return open_source(config, tokenizer, length)
    except ValueError as error:
        raise ValueError(f"data[{number}]: {error}") from error


def _long(config: SourceConfig) -> str:
    return "drop" if isinstance(config, TaskConfig | ErasedConfig) else config.long


def _dataset(
    sources: Sequence[Source],
    configs: Sequence[SourceConfig],
    *,
    seeds: Sequence[int],
    length: int,
    batch: int,
    process: tuple[int, int],
    prefetch: int,
) -> Any:
    import grain

    class Flat(grain.experimental.FlatMapTransform):
        """The pieces of an example, one by one."""

        empty = 0

        def flat_map(self, pieces: list[Piece]) -> list[Piece]:
            self.empty = 0 if pieces else self.empty + 1
            if self.empty >= _EMPTY:
                raise ValueError(
                    f"data: {_EMPTY} examples in a row have nothing to train on; needed are "
                    "documents that fit a row, or `long: cut`, and answers within a row"
                )
            return pieces

    index, count = process
    parts = []
    for source, config, seed in zip(sources, configs, seeds, strict=False):

        def cut(example: Any, long: str = _long(config)) -> list[Piece]:
            return examples.pieces(example, length, long)

        # Shares are taken before mixing: of a mixture in turns, every n-th is of one source.
        shared = order.endless(source, seed)[index::count]
        parts.append(shared.map(cut))
    mixed = grain.MapDataset.mix(parts, weights=[config.weight for config in configs])
    erasing = any(isinstance(config, ErasedConfig) for config in configs)
    packed = ("tokens", "labels", "parts") if erasing else ("tokens", "labels")
    # One thread alone calls the tokenizer, that of the prefetching below.
    rows = mixed.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    rows = grain.experimental.FlatMapIterDataset(rows, Flat())
    rows = grain.experimental.FirstFitPackIterDataset(
        rows,
        length_struct=dict.fromkeys(packed, length),
        num_packing_bins=max(batch, _OPEN_ROWS),
        seed=seeds[-1],
        shuffle_bins=True,
    )
    batches = rows.batch(batch, drop_remainder=True).map(_batch)
    return grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)


def _close(iterator: Any) -> None:
    iterator.close()
    # Grain closes again where the iterator is deleted, also when modules are gone already.
    iterator.close = lambda: None


def _batch(packed: Mapping[str, np.ndarray]) -> Batch:
    batch = Batch(
        tokens=packed["tokens"],
        segments=packed["tokens_segment_ids"] - np.int32(1),  # Grain's padding is 0
        positions=packed["tokens_positions"],
        labels=packed["labels"],
    )
    if "parts" in packed:
        batch["parts"] = packed["parts"]
    return batch
