"""Budgets: what is read, what is refused, and what a length makes of them."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from kvjax import Budget, ModelConfig, bucket_length
from kvjax.budget import available_bytes, entry_nbytes

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (256, Budget(tokens=256)),
        ("256", Budget(tokens=256)),
        (" 7 ", Budget(tokens=7)),
        (1, Budget(tokens=1)),
        ("1", Budget(tokens=1)),
        (0.25, Budget(fraction=0.25)),
        (1.0, Budget(fraction=1.0)),
        ("0.25", Budget(fraction=0.25)),
        (".5", Budget(fraction=0.5)),
        ("1.", Budget(fraction=1.0)),
        ("5.0e-1", Budget(fraction=0.5)),
        ("25%", Budget(fraction=0.25)),
        ("12.5 %", Budget(fraction=0.125)),
        ("100%", Budget(fraction=1.0)),
        ("64MiB", Budget(bytes=64 * 2**20)),
        ("64 mib", Budget(bytes=64 * 2**20)),
        ("64MB", Budget(bytes=64 * 10**6)),
        ("1.5KiB", Budget(bytes=1536)),
        ("2GiB", Budget(bytes=2 * 2**30)),
        ("3gb", Budget(bytes=3 * 10**9)),
        ("512B", Budget(bytes=512)),
        ("bytes:4096", Budget(bytes=4096)),
        (Budget(tokens=3), Budget(tokens=3)),
    ],
)
def test_budgets_are_read_as_tokens_fractions_or_bytes(given, meant):
    assert Budget.parse(given) == meant


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (0, "0 tokens"),
        (-1, "-1 tokens"),
        (0.0, "fraction 0.0"),
        (-0.5, "fraction -0.5"),
        (1.5, "fraction 1.5"),
        (float("nan"), "fraction nan"),
        (float("inf"), "fraction inf"),
        ("0", "0 tokens"),
        ("-3", "-3 tokens"),
        ("0.0", "fraction 0.0"),
        ("1.5", "fraction 1.5"),
        ("-0.25", "fraction -0.25"),
        ("150%", "fraction 1.5"),
        ("0%", "fraction 0.0"),
        ("-5%", "fraction -0.05"),
        ("0B", "0 bytes"),
        ("0.4B", "0 bytes"),
        ("-4MiB", "-4194304 bytes"),
        ("bytes:0", "0 bytes"),
        *[(text, repr(text)) for text in ("", "a quarter", "64XB", "1e3", "nan", "inf", "0x10")],
        *[(text, repr(text)) for text in ("1,000", "bytes:", "25 % 3", "0.5\n0.5", "--5", "5 5")],
        *[(value, repr(value)) for value in (True, False, None, [0.5], {}, b"4", 1j)],
    ],
)
def test_anything_else_is_refused_in_one_line_that_names_it(given, named):
    with pytest.raises(ValueError) as caught:
        Budget.parse(given)
    message = str(caught.value)
    assert "\n" not in message
    assert f"budget {named}" in message
    assert "allowed are" in message


def test_a_budget_has_exactly_one_value():
    with pytest.raises(ValueError, match="0 values"):
        Budget()
    with pytest.raises(ValueError, match="2 values"):
        Budget(tokens=3, fraction=0.5)


@pytest.mark.parametrize("fraction", [1e-9, 0.01, 0.1, 0.125, 0.25, 1 / 3, 0.5, 0.9, 0.999, 1.0])
def test_a_fraction_never_empties_a_cache_nor_exceeds_the_prompt(fraction):
    entries = [Budget(fraction=fraction).resolve(n, CONFIG, jnp.float32) for n in range(1, 301)]
    for length, kept in enumerate(entries, start=1):
        assert 1 <= kept <= length
        assert abs(kept - fraction * length) <= 0.5 or kept == 1
    assert entries == sorted(entries)


@pytest.mark.parametrize("tokens", [1, 2, 100, 300, 10**9])
def test_tokens_are_kept_up_to_the_length_of_the_prompt(tokens):
    for length in range(1, 301):
        assert Budget(tokens=tokens).resolve(length, CONFIG, jnp.float32) == min(tokens, length)


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_bytes_hold_as_many_entries_as_fit(dtype, size):
    each = 3 * 2 * (2 * 8 * size + 4)  # layers, KV heads, K and V and a position
    assert entry_nbytes(CONFIG, dtype) == each
    for kept in (1, 2, 57, 300):
        for spare in (0, each - 1):
            budget = Budget(bytes=kept * each + spare)
            assert budget.resolve(300, CONFIG, dtype) == kept
    assert Budget(bytes=1000 * each).resolve(300, CONFIG, dtype) == 300


def test_bytes_below_one_entry_or_above_the_machine_are_refused():
    with pytest.raises(ValueError, match="budget 5 bytes: one token"):
        Budget(bytes=5).resolve(10, CONFIG, jnp.float32)
    beyond = available_bytes() + 1
    with pytest.raises(ValueError, match=f"budget {beyond} bytes"):
        Budget(bytes=beyond).resolve(10, CONFIG, jnp.float32)


@pytest.mark.parametrize("length", [0, -3])
def test_lengths_below_one_are_refused(length):
    with pytest.raises(ValueError, match=str(length)):
        Budget(tokens=1).resolve(length, CONFIG, jnp.float32)
    with pytest.raises(ValueError, match=str(length)):
        bucket_length(length)


def test_buckets_hold_their_prompt_and_are_few():
    lengths = range(1, 5000)
    buckets = [bucket_length(n) for n in lengths]
    assert all(bucket >= n for bucket, n in zip(buckets, lengths, strict=True))
    assert buckets == sorted(buckets)
    assert all(bucket_length(bucket) == bucket for bucket in set(buckets))
    assert all(
        bucket - n <= bucket / 5 for bucket, n in zip(buckets, lengths, strict=True) if n > 256
    )
    assert len(set(buckets)) < 45
