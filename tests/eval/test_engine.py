"""The engine against a small random model: rows of a batch, compilations, measured bytes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from eval import config, engine, harness
from tests.eval.fakes import WordTokenizer, small_config

CONFIG = kvjax.ModelConfig(
    vocab_size=2048,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_length=2048,
)
POLICIES = ["full", "random", "streaming", "knorm", "snapkv", "h2o"]


@pytest.fixture(scope="module")
def loaded():
    return kvjax.Decoder.random(CONFIG, jax.random.key(1)), WordTokenizer()


@pytest.fixture
def run_config():
    task = {"name": "needle", "haystack": "noise", "lengths": [200], "depths": [0.5], "samples": 3}
    return small_config(tasks=[task], policies=POLICIES, budgets=[0.5, 40])


def test_samples_of_one_bucket_compile_nothing_new(loaded, run_config, tmp_path):
    counts = []
    runner = engine.build(run_config, loaded)
    results = harness.run(
        run_config, runner, lambda line: counts.append(runner.compilations), output=tmp_path
    )
    assert results.failures == []
    # One prefill; per group one extend and one generate; the compressions.
    assert counts[0] == counts[-1] == 1 + 3 * 2 + 1 + 2 * (len(POLICIES) - 1)


def test_policies_side_by_side_answer_as_each_alone(loaded, run_config):
    runner = engine.build(run_config, loaded)
    prefilled = runner.prefill(list(range(5, 130)))
    question = list(range(300, 320))
    rows = [runner.compress(prefilled, name, 40, (100, None)) for name in POLICIES[1:]]
    together = runner.answer(prefilled, rows, question, 8)
    for row, tokens in zip(rows, together.tokens, strict=True):
        assert runner.answer(prefilled, [row], question, 8).tokens == [tokens]


def test_bytes_are_those_of_the_arrays_and_budgets_hold(loaded, run_config):
    runner = engine.build(run_config, loaded)
    prefilled = runner.prefill(list(range(5, 130)))
    for name in POLICIES[1:]:
        row = runner.compress(prefilled, name, 40, (100, None))
        assert row.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(row.cache))
        per_entry = 2 * CONFIG.head_dim * 4 + 4
        assert row.alive == 40
        assert row.alive_nbytes == 40 * CONFIG.num_layers * CONFIG.num_kv_heads * per_entry
        assert row.kept.shape == (125,) and row.kept.sum() == pytest.approx(40)
        assert np.all((row.kept >= 0) & (row.kept <= 1))


def test_the_full_cache_answers_as_one_pass_over_everything(loaded, run_config):
    runner = engine.build(run_config, loaded)
    prompt, question = list(range(5, 130)), list(range(300, 320))
    whole = runner.prefill(prompt + question)
    parts = runner.prefill(prompt)
    full = [runner.compress(p, "full", p.length, (200, None)) for p in (whole, parts)]
    seen = runner.answer(whole, full[:1], [], 8)
    hidden = runner.answer(parts, full[1:], question, 8)
    assert seen.tokens == hidden.tokens and seen.question_seconds == 0


@pytest.mark.parametrize("option", [{"prefill": "chunked"}, {"decode_interval": 8}, {"chunk": 64}])
def test_a_schedule_that_cannot_share_a_prefill_is_refused(option):
    name, value = next(iter(option.items()))
    policy = config.PolicyConfig(name="snapkv", options=((name, value),))
    with pytest.raises(ValueError, match=rf"policies\[0\]\.snapkv\.{name}={value!r}"):
        engine.build_policies([policy])


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_finds_the_needle_with_the_full_cache(default_model, tmp_path):
    task = {"name": "needle", "haystack": "prose", "lengths": [300], "depths": [0.5], "samples": 2}
    content = small_config(tasks=[task], policies=["full"], budgets=[0.5])
    results = harness.run(content, engine.build(content, default_model), output=tmp_path)
    assert [s.records[0].score for s in results.samples] == [1, 1]
    assert all(s.prompt_tokens + s.question_tokens >= 0.98 * 300 for s in results.samples)
