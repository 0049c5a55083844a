"""Rows hold whole examples one after the other, and the stream goes on as if never broken."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.eval.tasks import written
from tests.train.data import stream
from tests.train.data.tokens import StableTokenizer
from train import data

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


class NumberTokenizer(StableTokenizer):
    """Reads "5 6 7" as the tokens 5, 6, 7."""

    def encode(self, text, add_special_tokens=False):
        return [int(number) for number in text.split()]


def numbered(path: Path, sizes: list[int], first: int = 1) -> tuple[Path, list[list[int]]]:
    """Documents of the given numbers of tokens, no token twice."""
    documents, start = [], first
    for size in sizes:
        documents.append(list(range(start, start + size)))
        start += size
    rows = [{"text": " ".join(map(str, document))} for document in documents]
    return written.jsonl(path, rows), documents


def of_numbers(sources, **options) -> data.Batches:
    options = {"length": 16, "batch": 2, "seed": 0, "prefetch": 0} | options
    return data.build(data.read("data", sources), NumberTokenizer(), **options)


def segments(batch: data.Batch) -> list[tuple[list[int], list[bool]]]:
    """Tokens and labels of every segment, checked to stand as they are documented to."""
    for name, kind in (("tokens", "i4"), ("segments", "i4"), ("positions", "i4"), ("labels", "?")):
        assert batch[name].dtype == np.dtype(kind)
        assert batch[name].shape == batch["tokens"].shape
    found = []
    for tokens, ids, positions, labels in zip(*(batch[n] for n in batch), strict=True):
        used = int((ids >= 0).sum())
        assert (ids[used:] == -1).all()
        assert not labels[used:].any()
        assert ids[0] == 0
        assert set(np.diff(ids[:used])) <= {0, 1}
        for number in range(ids.max() + 1):
            here = np.flatnonzero(ids == number)
            assert positions[here].tolist() == list(range(len(here)))
            assert not labels[here[-1]]
            found.append((tokens[here].tolist(), labels[here].tolist()))
    return found


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    length=st.integers(2, 24),
    rows=st.integers(1, 4),
    long=st.sampled_from(["cut", "drop"]),
    seed=st.integers(0, 2**31),
)
def test_rows_hold_every_piece_of_every_document(tmp_path_factory, sizes, length, rows, long, seed):
    path, documents = numbered(tmp_path_factory.mktemp("numbers") / "a.jsonl", sizes)
    kept = [d for d in documents if long == "cut" or len(d) <= length]
    pieces = [d[i : i + length] for d in kept for i in range(0, len(d), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    batches = of_numbers([{"text": str(path), "long": long}], length=length, batch=rows, seed=seed)
    if not pieces:
        with pytest.raises(ValueError, match="nothing to train on"):
            next(batches)
        return
    seen = collections.Counter()
    # Every row holds a piece, and while one epoch's are being packed few of the next join them.
    for _ in range(2 * len(pieces) // rows + 64):
        batch = next(batches)
        assert batch["tokens"].shape == (rows, length)
        for tokens, labels in segments(batch):
            assert labels == [True] * (len(tokens) - 1) + [False]
            seen[tuple(tokens)] += 1
    assert set(seen) == {tuple(piece) for piece in pieces}


def test_documents_of_an_epoch_come_once_before_the_next_epoch(tmp_path):
    path, documents = numbered(tmp_path / "a.jsonl", [9] * 64)
    batches = of_numbers([{"text": str(path)}], length=9, batch=16)
    epochs = [[tokens for _ in range(4) for tokens, _ in segments(next(batches))] for _ in "ab"]
    assert all(sorted(epoch) == documents for epoch in epochs)
    assert epochs[0] != epochs[1] != documents != epochs[0]


def test_sources_are_mixed_by_their_weights(tmp_path):
    one, _ = numbered(tmp_path / "a.jsonl", [8] * 10)
    two, _ = numbered(tmp_path / "b.jsonl", [8] * 1000, first=1001)
    batches = of_numbers(
        [{"text": str(one), "weight": 3}, {"text": str(two), "weight": 1}], length=8, batch=100
    )
    share = [np.mean(next(batches)["tokens"][:, 0] <= 1000) for _ in range(8)]
    assert np.mean(share) == pytest.approx(0.75, abs=0.01)
    assert all(0.6 < s < 0.9 for s in share)


def test_seeds_give_orders_of_their_own(tmp_path):
    path, _ = numbered(tmp_path / "a.jsonl", [4] * 50)

    def first(seed):
        return next(of_numbers([{"text": str(path)}], seed=seed, batch=8))["tokens"].tolist()

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_processes_share_every_source_and_see_different_examples(tmp_path):
    one, documents = numbered(tmp_path / "a.jsonl", [8] * 60)
    two, more = numbered(tmp_path / "b.jsonl", [8] * 60, first=1001)
    sources = [{"text": str(one)}, {"text": str(two)}]
    seen = []
    for process in range(3):
        batches = of_numbers(sources, process=(process, 3), length=8, batch=20)
        tokens = [t for _ in range(2) for t, _ in segments(next(batches))]
        seen.append({tuple(t) for t in tokens})
        assert len(seen[-1]) == 40
        assert sum(t[0] <= 1000 for t in tokens) == 20
    assert set.union(*seen) == {tuple(d) for d in documents + more}
    assert sum(map(len, seen)) == 120


def test_processes_make_different_samples(root):
    batches = [stream.build(root, process=(i, 2), prefetch=0) for i in range(2)]
    needles = []
    for own in batches:
        texts = [StableTokenizer().decode(t) for _ in range(6) for t, _ in segments(next(own))]
        needles.append({t for t in texts if "special magic" in t})
    assert all(len(own) > 5 for own in needles)
    assert not needles[0] & needles[1]


@pytest.fixture(scope="module")
def unbroken(root) -> list[str]:
    batches = stream.build(root, prefetch=0)
    return [stream.digest(next(batches)) for _ in range(40)]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_stream_goes_on_from_every_state(root, unbroken, prefetch):
    batches = stream.build(root, prefetch=prefetch)
    states = [batches.get_state()]
    for expected in unbroken[:30]:
        assert stream.digest(next(batches)) == expected
        states.append(batches.get_state())
    other = stream.build(root, prefetch=2 - min(prefetch, 2))
    for at in (30, 0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 29):
        other.set_state(json.loads(json.dumps(states[at])))
        assert other.get_state() == states[at]
        assert [stream.digest(next(other)) for _ in range(3)] == unbroken[at : at + 3]
    batches.set_state(states[11])
    assert [stream.digest(next(batches)) for _ in range(12)] == unbroken[11:23]
    assert len(set(unbroken)) == len(unbroken)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(2, 60), min_size=3, max_size=20), at=st.integers(0, 60))
def test_the_stream_goes_on_from_the_middle_of_a_document(tmp_path_factory, sizes, at):
    path, _ = numbered(tmp_path_factory.mktemp("numbers") / "a.jsonl", sizes)
    batches = of_numbers([{"text": str(path)}], batch=1)
    for _ in range(at):
        next(batches)
    other = of_numbers([{"text": str(path)}], batch=1)
    other.set_state(batches.get_state())
    for _ in range(20):
        assert stream.digest(next(other)) == stream.digest(next(batches))


def in_a_new_process(root, count, state=None) -> list[str]:
    asked = json.dumps({"root": str(root), "seed": 0, "count": count, "state": state})
    command = [sys.executable, "-m", "tests.train.data.stream"]
    done = subprocess.run(
        command, cwd=ROOT, input=asked, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_a_new_process_makes_the_same_batches_and_goes_on_from_a_state(root, unbroken):
    assert in_a_new_process(root, 6) == unbroken[:6]
    batches = stream.build(root)
    for _ in range(13):
        next(batches)
    assert in_a_new_process(root, 5, batches.get_state()) == unbroken[13:18]


def test_a_state_of_other_data_is_refused_in_one_line(root, tmp_path):
    state = stream.build(root, prefetch=0).get_state()
    path, _ = numbered(tmp_path / "a.jsonl", [4, 5])
    for other, message in (
        (stream.build(root, seed=1, prefetch=0), "seed was 0 and is 1"),
        (stream.build(root, batch=3, prefetch=0), "batch was 2 and is 3"),
        (stream.build(root, process=(1, 2), prefetch=0), r"process was \[0, 1\] and is \[1, 2\]"),
        (of_numbers([{"text": str(path)}]), "sources was "),
    ):
        with pytest.raises(ValueError, match=f"state of the data: {message}") as caught:
            other.set_state(state)
        assert "\n" not in str(caught.value)
    for broken in ({}, {"version": 0}, None):
        with pytest.raises(ValueError, match="version 1 of get_state is needed"):
            stream.build(root, prefetch=0).set_state(broken)


def test_closing_ends_the_background_thread(root):
    def prefetching():
        return [t for t in threading.enumerate() if t.name.startswith("grain-thread-prefetch")]

    before = len(prefetching())
    batches = stream.build(root, prefetch=2)
    next(batches)
    assert len(prefetching()) == before + 1
    batches.close()
    assert len(prefetching()) == before


def test_an_error_in_the_background_is_raised_where_batches_are_asked_for(tmp_path):
    path, _ = numbered(tmp_path / "a.jsonl", [30, 40])
    batches = of_numbers([{"text": str(path), "long": "drop"}], prefetch=2)
    with pytest.raises(ValueError, match="1000 examples in a row have nothing to train on"):
        next(batches)


def test_bad_numbers_and_sources_are_refused_in_one_line(root, tmp_path):
    for options, message in (
        ({"length": 1}, "length=1: allowed: integers >= 2"),
        ({"batch": 0}, "batch=0: allowed: integers >= 1"),
        ({"seed": -1}, "seed=-1: allowed: integers >= 0"),
        ({"prefetch": -1}, "prefetch=-1: allowed: integers >= 0"),
        ({"process": (2, 2)}, r"process=\(2, 2\): allowed: \(i, n\) with 0 <= i < n"),
        ({"length": 200}, r"data\[2\]: lengths=\[150, 250\]: rows have 200 tokens"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            stream.build(root, **{"prefetch": 0} | options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="data: has no sources"):
        data.build((), StableTokenizer(), length=8, batch=1, seed=0)
    with pytest.raises(ValueError, match=r"data\[1\]: .*none.txt: no such file"):
        path, _ = numbered(tmp_path / "a.jsonl", [3])
        of_numbers([{"text": str(path)}, {"text": str(tmp_path / "none.txt")}])


def test_training_imports_without_grain_and_pyarrow():
    code = (
        "import sys; sys.modules['grain'] = sys.modules['pyarrow'] = None; import train.data;"
        "print(train.data.read('data', [{'text': 'a'}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "TextConfig" in done.stdout


def test_the_default_models_batches_hold_its_tokens(default_model, tmp_path):
    tokenizer = default_model.tokenizer
    (tmp_path / "a.txt").write_text("The river rose in the night. " * 40)
    needle = {"task": "needle", "lengths": [200, 240], "haystacks": ["sentences"]}
    sources = data.read("data", [{"text": str(tmp_path)}, needle])
    batches = data.build(sources, tokenizer, length=256, batch=4, seed=0)
    found = segments(next(batches)) + segments(next(batches))
    texts = [tokenizer.decode(tokens, False) for tokens, _ in found]
    assert any(text.startswith("The river rose") for text in texts)
    answered = [text for text in texts if text.startswith("<|im_start|>system")]
    assert answered
    assert all(text.endswith(".<|im_end|>") for text in answered)
    batches.close()
