"""The engine against a small random model: rows of a batch, compilations, measured bytes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from eval import config, engine, harness
from eval.identity import differing
from kvjax.learned.memory import MemoryConfig
from kvjax.learned.modules import Card, fingerprints, save_module
from kvjax.learned.retention import GateConfig, init_gates
from kvjax.policy_arrays import module_directories
from tests import tiny
from tests.eval.fakes import WordTokenizer, small_config
from train.retention import RetentionConfig, RetentionRecipe

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
    prefilled = runner.prefill([list(range(5, 130))])
    question = list(range(300, 320))
    rows = [
        runner.compress(prefilled, name, [40], engine.Layout(capacity=100)) for name in POLICIES[1:]
    ]
    together = runner.answer(prefilled, rows, [question], 8)
    for row, tokens in zip(rows, together.tokens, strict=True):
        assert runner.answer(prefilled, [row], [question], 8).tokens == [tokens]


def test_bytes_are_those_of_the_arrays_and_budgets_hold(loaded, run_config):
    runner = engine.build(run_config, loaded)
    prefilled = runner.prefill([list(range(5, 130))])
    for name in POLICIES[1:]:
        row = runner.compress(prefilled, name, [40], engine.Layout(capacity=100))
        (measured,) = row.rows
        assert measured.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(row.cache))
        per_entry = 2 * CONFIG.head_dim * 4 + 4
        assert measured.alive == 40
        assert measured.alive_nbytes == 40 * CONFIG.num_layers * CONFIG.num_kv_heads * per_entry
        assert measured.kept.shape == (125,) and measured.kept.sum() == pytest.approx(40)
        assert np.all((measured.kept >= 0) & (measured.kept <= 1))


def test_the_full_cache_answers_as_one_pass_over_everything(loaded, run_config):
    runner = engine.build(run_config, loaded)
    prompt, question = list(range(5, 130)), list(range(300, 320))
    whole = runner.prefill([prompt + question])
    parts = runner.prefill([prompt])
    full = [
        runner.compress(p, "full", p.lengths, engine.Layout(capacity=200)) for p in (whole, parts)
    ]
    seen = runner.answer(whole, full[:1], [[]], 8)
    hidden = runner.answer(parts, full[1:], [question], 8)
    assert seen.tokens == hidden.tokens and seen.question_seconds == 0


def test_a_batch_of_contexts_answers_as_each_alone(loaded, run_config):
    runner = engine.build(run_config, loaded)
    prompts = [list(range(5, 130)), list(range(200, 310)), list(range(400, 520))]
    questions = [list(range(300, 320)), list(range(9, 14)), list(range(50, 63))]
    layout, budgets = engine.Layout(capacity=100), [40, 30, 60]

    def answers(which):
        prefilled = runner.prefill([prompts[i] for i in which])
        rows = [
            runner.compress(prefilled, name, [budgets[i] for i in which], layout)
            for name in POLICIES[1:]
        ]
        measured = [[row.alive for row in policy.rows] for policy in rows]
        said = runner.answer(prefilled, rows, [questions[i] for i in which], 8).tokens
        return measured, said

    alive, together = answers([0, 1, 2])
    for i in range(3):
        alone = answers([i])
        assert [policy[i] for policy in together] == [policy[0] for policy in alone[1]]
        assert [policy[i] for policy in alive] == [policy[0] for policy in alone[0]]


def test_rows_that_have_ended_leave_the_batch_and_change_no_answer(loaded, run_config):
    runner = engine.build(run_config, loaded)
    prefilled = runner.prefill([list(range(5, 130))])
    layout = engine.Layout(capacity=160)
    rows = [runner.compress(prefilled, name, [40], layout) for name in POLICIES[1:]]
    question = [list(range(300, 320))]
    endless = [texts[0] for texts in runner.answer(prefilled, rows, question, 50).tokens]
    assert [len(tokens) for tokens in endless] == [50] * 5
    # Whatever the rows say fourth ends them: all but those that say the last row's fourth late.
    ends = {tokens[3] for tokens in endless[:4]}
    expected = [
        tokens[: next((i for i, t in enumerate(tokens) if t in ends), 50)] for tokens in endless
    ]

    class Ending(WordTokenizer):
        end_tokens = frozenset(ends)

    other = engine.build(run_config, (loaded[0], Ending()))
    ended = other.answer(prefilled, rows, question, 50)
    assert [texts[0] for texts in ended.tokens] == expected
    assert ended.steps == max(map(len, expected))


def test_published_schedules_give_way_to_the_shared_prefill_unless_asked_for():
    def built(**options):
        config_ = config.PolicyConfig(name="streaming", options=tuple(options.items()))
        return engine.build_policies([config_])[config_.label].schedule

    assert built().decode_interval is None and built().prefill == "whole"
    assert built(decode_interval=8).decode_interval == 8
    assert (built(prefill="chunked", chunk=64).prefill, built(chunk=64).prefill) == (
        "chunked",
        "whole",
    )


def test_a_policy_that_evicts_while_decoding_stays_within_its_budget(loaded, run_config):
    options = (("decode_interval", 4),)
    policies = [config.PolicyConfig(name="streaming", options=options)]
    runner = engine.KvjaxEngine(loaded, engine.build_policies(policies))
    prefilled = runner.prefill([list(range(5, 130))])
    (label,) = set(runner.policies) - {"full"}
    layout = runner.layout(label, 40, prefilled.bucket, runner.room(20, 64))
    assert layout.alone == label and layout.capacity < 40 + 64
    compressed = runner.compress(prefilled, label, [40], layout)
    answers = runner.answer(prefilled, [compressed], [list(range(300, 320))], 64)
    model, policy = runner.model, runner.policies[label]
    logits, cache = kvjax.prefill(
        model, [list(range(5, 130))], policy=policy, budget=40, capacity=layout.capacity
    )
    logits, cache = kvjax.extend(model, cache, [list(range(300, 320))], policy=policy, budget=40)
    expected = kvjax.generate(
        model,
        cache,
        logits,
        max_new_tokens=64,
        end_tokens=runner.tokenizer.end_tokens,
        policy=policy,
        budget=40,
    )
    assert answers.tokens == [[np.asarray(expected.tokens)[0, : expected.lengths[0]].tolist()]]


def test_a_policy_that_remembers_is_read_with_what_it_wrote(loaded, tmp_path):
    model, ends = loaded[0], loaded[1].end_tokens
    card = Card(
        module="snapkv+memory",
        kind="memory",
        options=dataclasses.asdict(MemoryConfig()),
        backbone="small",
        fingerprints=fingerprints(model),
    )
    save_module(tmp_path, tiny.memory(layers=2), card)
    options = (("memory_path", str(tmp_path)), ("window", 8))
    policies = [config.PolicyConfig(name="snapkv+memory", options=options)]
    runner = engine.KvjaxEngine(loaded, engine.build_policies(policies))
    (label,) = set(runner.policies) - {"full"}
    prompts, question = [list(range(5, 130)), list(range(200, 300))], list(range(300, 320))
    prefilled = runner.prefill(prompts)
    layout = runner.layout(label, 40, prefilled.bucket, runner.room(20, 32))
    assert layout.alone == label
    compressed = runner.compress(prefilled, label, [40, 30], layout)
    answers = runner.answer(prefilled, [compressed], [question, question], 32)
    policy, params = runner.policies[label], runner.params[label]
    memory = kvjax.nbytes(compressed.cache.policy_state.memory) // 2
    for row, (prompt, budget) in enumerate(zip(prompts, (40, 30), strict=True)):
        _, cache = kvjax.prefill(
            model, [prompt], policy=policy, budget=budget, capacity=layout.capacity, params=params
        )
        entries = 2 * 2 * budget * (2 * 8 * 4 + 4)
        assert compressed.rows[row].alive_nbytes == entries + memory > entries
        given = {"policy": policy, "params": params}
        logits, cache = kvjax.extend(model, cache, [question], **given)
        expected = kvjax.generate(model, cache, logits, max_new_tokens=32, end_tokens=ends, **given)
        tokens = np.asarray(expected.tokens)[0, : expected.lengths[0]].tolist()
        assert answers.tokens[0][row] == tokens


def test_a_chunked_policy_has_a_prefill_of_its_own(loaded, run_config):
    options = (("chunk", 32), ("prefill", "chunked"))
    policies = [config.PolicyConfig(name="knorm", options=options)]
    runner = engine.KvjaxEngine(loaded, engine.build_policies(policies))
    (label,) = set(runner.policies) - {"full"}
    prompt = list(range(5, 130))
    prefilled = runner.prefill([prompt])
    layout = runner.layout(label, 40, prefilled.bucket, 64)
    compressed = runner.compress(prefilled, label, [40], layout)
    logits, cache = kvjax.prefill(
        runner.model, [prompt], policy=runner.policies[label], budget=40, room=64
    )
    np.testing.assert_allclose(compressed.logits, logits, rtol=1e-5, atol=1e-5)
    assert np.array_equal(compressed.cache.positions[..., :40], cache.positions[..., :40])


def test_a_trained_module_is_a_policy_of_a_config(loaded, run_config, tmp_path):
    model, _ = loaded
    recipe = RetentionRecipe(RetentionConfig(width=8, memory=16, bias=2.0), 128)
    recipe.export(recipe.init(model, jax.random.key(0)), model, tmp_path / "gates", {})
    path = str(tmp_path / "gates")
    changed = small_config(
        tasks=[run_config.mapping["tasks"][0] | {"samples": 1}],
        policies=["full", {"retention-global": {"path": path}}],
        budgets=[0.5],
    )
    results = harness.run(changed, engine.build(changed, loaded), output=tmp_path / "run")
    assert [record.error for _, record in results.failures] == []
    full, kept = results.samples[0].records
    assert kept.kept_tokens == pytest.approx(full.kept_tokens / 2, abs=1)


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_finds_the_needle_with_the_full_cache(default_model, tmp_path):
    task = {"name": "needle", "haystack": "prose", "lengths": [300], "depths": [0.5], "samples": 2}
    content = small_config(tasks=[task], policies=["full"], budgets=[0.5])
    results = harness.run(content, engine.build(content, default_model), output=tmp_path)
    assert [s.records[0].score for s in results.samples] == [1, 1]
    assert all(s.prompt_tokens + s.question_tokens >= 0.98 * 300 for s in results.samples)


def test_a_batch_shrinks_to_few_sizes_that_hold_little_padding():
    sizes = [engine._batch_size(rows) for rows in range(1, 200)]
    assert all(rows <= size <= 1.5 * rows for rows, size in enumerate(sizes, 1))
    assert set(sizes) == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256}


def write_gates(directory, model, seed, **changes):
    options = GateConfig(width=4)
    sizes = {"num_layers": 2, "num_kv_heads": 2, "hidden_size": 32}
    arrays = init_gates(options, jax.random.key(seed), bias=3.0, **sizes)
    card = Card(
        module="retention-global",
        kind="retention",
        options=dataclasses.asdict(options),
        backbone="small",
        fingerprints=fingerprints(model),
        **changes,
    )
    save_module(directory, arrays, card)


def test_an_identity_follows_weights_and_trained_modules(loaded, tmp_path):
    model, tokenizer = loaded
    gated = [{"retention-global": {"path": str(tmp_path)}}]
    settings = small_config(policies=["full", "snapkv", *gated])

    def identity(model=model):
        return engine.build(settings, (model, tokenizer)).identity()

    write_gates(tmp_path, model, 0)
    first = identity()
    models = {f"model ({dtype})" for dtype in ("float32", "bfloat16", "float16")}
    policy = f"policy {settings.policies[2].label}"
    assert set(first) == {*models, "tokenizer", policy}
    write_gates(tmp_path, model, 0, scores={"measured": "later"})
    assert identity() == first
    write_gates(tmp_path, model, 1)
    again = identity()
    assert [name for name in first if first[name] != again[name]] == [policy]
    other = kvjax.Decoder.random(CONFIG, jax.random.key(2))
    write_gates(tmp_path, other, 1)
    assert not {first[name] for name in models} & {identity(other)[name] for name in models}


def test_a_model_in_another_dtype_is_the_same_one(loaded):
    """A run may go on in bfloat16, which its environments say; other weights are refused."""
    model, tokenizer = loaded
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), model)
    settings = small_config(policies=["full"])
    one, other = (engine.build(settings, (m, tokenizer)).identity() for m in (model, rounded))
    assert differing(one, other) == [] and set(one) > set(other) > {"tokenizer"}


def test_a_module_may_lie_under_the_home(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gates(tmp_path / "gates", loaded[0], 0)
    policy = kvjax.policy("retention-global", path="~/gates")
    assert kvjax.policy_params(loaded[0], policy) is not None
    assert module_directories(loaded[0], policy) == [tmp_path / "gates"]
