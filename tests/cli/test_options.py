"""Values that several commands share, and what they are where they are left out."""

from __future__ import annotations

import pytest

import kvjax
from kvjax.cli.options import pages_of


@pytest.mark.parametrize(
    ("policy", "allocator", "size"),
    [
        ("full", None, None),
        ("snapkv", None, None),
        ("snapkv", "ada", 16),
        ("pyramidkv", None, 16),
        ("retention-local", None, None),
        ("retention-global", None, 16),
    ],
)
def test_heads_of_uneven_shares_get_pages(policy, allocator, size):
    built = kvjax.policy(policy, allocator=allocator)
    assert pages_of(None, built) == size
    assert pages_of(0, built) is None
    assert pages_of(32, built) == 32


def test_the_bytes_of_a_global_budget_follow_the_budget(run, folder, monkeypatch):
    caches, prefill = [], kvjax.prefill

    def recorded(*arguments, **more):
        logits, cache = prefill(*arguments, **more)
        caches.append(cache)
        return logits, cache

    monkeypatch.setattr(kvjax, "prefill", recorded)
    command = (
        *("generate", "--model", folder, "--raw", "--prompt", "the quick brown fox " * 20),
        *("--policy", "keydiff", "--option", "allocator=global", "--budget", "25%"),
        *("--max-new-tokens", 1),
    )
    for pages in ((), ("--pages", 0)):
        ran = run(*command, *pages)
        assert ran.status == 0, ran.err
    paged, padded = caches
    assert isinstance(paged, kvjax.PagedCache) and isinstance(padded, kvjax.PaddedCache)
    assert kvjax.nbytes(paged) < 0.6 * kvjax.nbytes(padded)
