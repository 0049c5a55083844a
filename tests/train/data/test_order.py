"""Every epoch has every example once, in an order of its own."""

from __future__ import annotations

import pytest

from train.data import order


class Numbers:
    identity = "numbers"

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"number": index}


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("length", [1, 50, 700])
def test_each_epoch_is_a_permutation(monkeypatch, length, listed):
    if not listed:
        monkeypatch.setattr(order, "_LISTED", 0)
    ordered = order.endless(Numbers(length), seed=3)
    first = [ordered[i]["number"] for i in range(length)]
    assert sorted(first) == list(range(length))
    if length > 1:
        number = min(length, 50)
        again = [ordered[i]["number"] for i in range(length, length + number)]
        assert len(set(again)) == number
        assert again != first[:number] != list(range(number))
        other = order.endless(Numbers(length), seed=4)
        assert [other[i]["number"] for i in range(number)] != first[:number]


def test_an_epoch_is_found_again_without_those_before_it():
    ordered = order.endless(Numbers(50), seed=3)
    late = [ordered[i]["number"] for i in range(5000, 5050)]
    assert sorted(late) == list(range(50))
    assert [order.endless(Numbers(50), seed=3)[i]["number"] for i in range(5000, 5050)] == late
