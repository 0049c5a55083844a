"""A label stands where the token after it is to be predicted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data import examples


@settings(deadline=None)
@given(
    targets=st.lists(st.booleans(), max_size=40),
    length=st.integers(2, 12),
    long=st.sampled_from(["cut", "drop"]),
)
def test_labels_are_the_targets_of_the_next_token(targets, length, long):
    tokens = list(range(100, 100 + len(targets)))
    whole = examples.Example(tokens=np.asarray(tokens, np.int32), targets=np.asarray(targets, bool))
    expected = []
    if long == "cut" or len(tokens) <= length:
        for start in range(0, len(tokens), length):
            stop = min(start + length, len(tokens))
            labels = [t + 1 < stop and targets[t + 1] for t in range(start, stop)]
            if any(labels):
                expected.append((tokens[start:stop], labels))
    found = examples.pieces(whole, length, long)
    assert [(p["tokens"].tolist(), p["labels"].tolist()) for p in found] == expected
    assert all(p["tokens"].dtype == np.int32 and p["labels"].dtype == bool for p in found)


def test_parts_are_joined_with_the_targets_of_each():
    joined = examples.example([([5, 6, 7], 1, 3), ([], 0, 0), ([8, 9], 0, 0), ([3], 0, 1)])
    assert joined["tokens"].tolist() == [5, 6, 7, 8, 9, 3]
    assert joined["targets"].tolist() == [False, True, True, False, False, True]
