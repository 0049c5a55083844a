"""Erasing measured end to end on a small random model: against whole forward passes."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from eval import durable
from eval.erasing import config as config_module
from eval.erasing import measure, records, run, tables
from eval.erasing.config import from_mapping, is_erasing
from eval.erasing.samples import prompt_of
from kvjax.cli.main import main
from kvjax.learned.eraser import EraserConfig, init_eraser, save_eraser
from tests.eval.fakes import WordTokenizer
from train.passes import plain_pass

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


@pytest.fixture(scope="module")
def loaded():
    return kvjax.Decoder.random(CONFIG, jax.random.key(1)), WordTokenizer()


def config(output="unused", **changes):
    return from_mapping(
        {
            "model": "small",
            "suites": ["chain", "needle-conflict"],
            "haystacks": ["sentences"],
            "lengths": [200],
            "span_tokens": [40],
            "samples": 2,
            "methods": ["mask", "note"],
            "max_new_tokens": 8,
            "output": str(output),
            **changes,
        }
    )


def learn_words(config, tokenizer):
    """The tokenizer knows the words that it has seen; here it sees those of all samples."""
    for _, request, _ in run.planned(config):
        prompt_of(run.made(request, tokenizer), tokenizer)


def log_p(model, tokens):
    row = jnp.asarray(tokens, jnp.int32)[None]
    places = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    x = plain_pass(model, {"tokens": row, "segments": jnp.zeros_like(row), "positions": places})
    return np.asarray(jax.nn.log_softmax(model.logits(x[0]), axis=-1), np.float64)


def test_both_ends_are_what_whole_passes_give(loaded):
    (_, request, _), *_ = run.planned(config())
    sample = run.made(request, loaded[1])
    prompt = prompt_of(sample, loaded[1])
    (found,) = measure.measure(loaded, None, measure.labelled(config().methods), [sample], 8)
    assert [one.method for one in found] == ["none", "recompute", "mask", "note"]
    by_method = {one.method: one for one in found}
    answer = np.arange(len(prompt.answer))
    behind = {}
    for method, context in (("none", prompt.context), ("recompute", prompt.clean)):
        tokens = [*context, *prompt.question, *prompt.answer]
        start = len(tokens) - len(prompt.answer) - 1
        behind[method] = log_p(loaded[0], tokens)[start:-1]
        nll = -behind[method][answer, prompt.answer].mean()
        np.testing.assert_allclose(by_method[method].nll, nll, rtol=1e-4)
    p, q = behind["recompute"], behind["none"]
    kl = (np.exp(p) * (p - q)).sum(axis=1).mean()
    np.testing.assert_allclose(by_method["none"].kl, kl, rtol=1e-3)
    assert by_method["recompute"].kl == 0.0 and by_method["mask"].kl > 0


def test_a_killed_run_goes_on_where_it_was(loaded, tmp_path):
    told = []
    learn_words(config(), loaded[1])
    whole = run.run(config(tmp_path / "whole"), loaded, told.append, batch=1)
    assert len(whole) == len(told) == 4
    assert len({one.id for one in whole}) == 4 and len({one.cell for one in whole}) == 2
    path = tmp_path / "whole" / "samples.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])
    told.clear()
    again = run.run(config(tmp_path / "whole"), loaded, told.append, batch=1)
    assert len(told) == 2 and again == whole
    page = tables.markdown(config(), again, {"commit": "abc"})
    assert page.count("n = 2; recomputation solves and no erasing fails") == 2
    for method in ("none", "recompute", "mask", "note"):
        assert page.count(f"\n| {method} |") == 2
    assert "* commit: abc" in page
    with pytest.raises(ValueError, match="results of another config"):
        run.run(config(tmp_path / "whole", seed=1), loaded)
    path.write_text(path.read_text().replace('"records"', '"notes"', 1))
    with pytest.raises(ValueError, match=r"line 2 is damaged; give --overwrite"):
        run.run(config(tmp_path / "whole"), loaded)
    assert json.loads(path.read_text().split("\n")[0])["format"] == records.FORMAT


def test_samples_side_by_side_give_what_each_gives_alone(loaded, tmp_path):
    """Prompts, spans, notes and answers of different lengths; a last batch that is not full."""
    given = {"samples": 3, "methods": ["mask", "note", {"local-repair": {"tokens": 8}}]}
    learn_words(config(**given), loaded[1])
    alone = run.run(config(tmp_path / "alone", **given), loaded, batch=1)
    told = []
    together = run.run(config(tmp_path / "together", **given), loaded, told.append, batch=2)
    assert len(told) == 4  # two of each suite, and one
    for one, other in zip(alone, together, strict=True):
        assert one.id == other.id and one.cell == other.cell
        for left, right in zip(one.records, other.records, strict=True):
            assert (left.method, left.answer) == (right.method, right.answer)
            np.testing.assert_allclose(left.nll, right.nll, rtol=1e-4)
            np.testing.assert_allclose(left.kl, right.kl, rtol=1e-3, atol=1e-6)


def test_an_eraser_is_loaded_where_a_method_needs_one(loaded, tmp_path):
    model = loaded[0]
    with pytest.raises(FileNotFoundError, match="holds no trained module"):
        run.run(config(tmp_path, methods=["kveraser"], eraser=str(tmp_path / "none")), loaded)
    fresh = init_eraser(EraserConfig(rank=2), jax.random.key(0), model.config)
    save_eraser(tmp_path / "eraser", fresh, model, backbone="small")
    given = {"methods": ["kveraser"], "eraser": str(tmp_path / "eraser"), "samples": 1}
    for result in run.run(config(tmp_path / "run", suites=["chain"], **given), loaded):
        none, _, steered = result.records
        assert steered.method == "kveraser"
        np.testing.assert_allclose(steered.nll, none.nll, rtol=1e-4)  # B is 0


def test_an_answer_longer_than_a_reply_is_refused(loaded, tmp_path):
    with pytest.raises(ValueError, match=r"max_new_tokens=1: an answer has \d+"):
        run.run(config(tmp_path, suites=["neighbour"], lengths=[300], max_new_tokens=1), loaded)


def test_several_spans_are_asked_of_the_suites_that_have_them():
    cells = {cell for _, _, cell in run.planned(config(spans=[1, 2], lengths=[300]))}
    assert cells == {
        "chain in sentences, 1 x 40 of 300 tokens",
        "needle-conflict in sentences, 1 x 40 of 300 tokens",
        "needle-conflict in sentences, 2 x 40 of 300 tokens",
    }


def test_gap_closed_is_0_without_erasing_and_1_at_recomputation():
    def one(method, nll, kl):
        return measure.Measured(method=method, exact=0.0, distractor=0.0, nll=nll, kl=kl, answer="")

    results = [
        records.ErasingResult(
            id=str(i),
            cell="cell",
            suite="chain",
            records=(one("none", 3.0, 1.0), one("recompute", 1.0, 0.0), one("mask", 2.5, 0.8)),
        )
        for i in range(3)
    ]
    page = tables.markdown(config(), results, {})
    assert [line.split("|")[6].strip() for line in page.split("\n") if line[:3] in
            ("| n", "| r", "| m")][-3:] == ["0.00", "1.00", "0.25"]  # fmt: skip
    assert "+0.200 [+0.200, +0.200]" in page and "-0.800 [-0.800, -0.800]" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suites": ["poem"]}, r"suites\[0\]='poem'"),
        ({"methods": []}, "methods"),
        ({"methods": ["mask", "mask"]}, "methods"),
        ({"samples": 0}, "samples=0"),
        ({"spans": [2], "suites": ["chain"]}, "spans=.*needle-conflict"),
        ({"policies": ["full"]}, "policies"),
    ],
)
def test_bad_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_bad_methods_are_refused_before_anything_runs(loaded, tmp_path):
    for methods, message in (
        (["burn"], "unknown erasing method 'burn'"),
        ([{"mask": {"tokens": 3}}], "method 'mask' has no option 'tokens'"),
        ([{"note": {"note": "x"}}], "method 'note' takes no options here"),
    ):
        with pytest.raises(ValueError, match=message):
            run.run(config(tmp_path / "run", methods=methods), loaded)
    assert not (tmp_path / "run").exists()


def test_a_config_of_erasing_is_told_by_its_methods(tmp_path):
    assert is_erasing({"methods": []}) and not is_erasing({"policies": []})
    path = tmp_path / "bad.yaml"
    path.write_text("model: x\nmethods: [mask]\n")
    with pytest.raises(ValueError, match=r"config '.*bad.yaml': missing key"):
        config_module.load(path)


# What fails, and what a run may go on with


def broken_at(monkeypatch, seed):
    """Every suite fails for samples of this seed, at every attempt."""
    make = run.suites.make

    def failing(request):
        if request.seed % run._STRIDE == seed:
            raise ValueError("the words asked for\nstand there more than once")
        return make(request)

    monkeypatch.setattr(run.suites, "make", failing)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_sample_that_cannot_be_made_is_listed_and_asked_again(
    loaded, tmp_path, monkeypatch, batch
):
    given = config(tmp_path, suites=["chain"], samples=3)
    learn_words(given, loaded[1])
    with monkeypatch.context() as patched:
        broken_at(patched, 0)  # the first, which planning makes
        told = []
        results = run.run(given, loaded, told.append, batch=batch)
    assert [one.error is None for one in results] == [False, True, True]
    assert "1 FAILED" in told[0]
    _, page = tables.write(records.read(tmp_path / "samples.jsonl"), tmp_path)
    assert "n = 2 (1 more failed); recomputation solves" in page
    assert f"* {results[0].id}: ValueError: the words asked for stand there more" in page
    told.clear()
    again = run.run(given, loaded, told.append, batch=batch)
    assert len(told) == 1 and all(one.error is None for one in again)
    assert [one.id for one in again] == [one.id for one in results]


def test_an_answer_that_is_too_long_costs_no_other_sample(loaded, tmp_path, monkeypatch):
    given = config(tmp_path, suites=["chain"], samples=3)
    learn_words(given, loaded[1])
    make = run.suites.make

    def longer(request):
        sample = make(request)
        if request.seed == 1:
            return dataclasses.replace(sample, answer="one two three four five six seven eight x")
        return sample

    monkeypatch.setattr(run.suites, "make", longer)
    results = run.run(given, loaded, batch=3)
    assert [one.error and one.error[:30] for one in results] == [
        None, "ValueError: max_new_tokens=8: ", None,
    ]  # fmt: skip


def test_a_cell_that_cannot_be_made_is_refused_before_anything_is_written(loaded, tmp_path):
    with pytest.raises(ValueError, match="length=20: too short"):
        run.run(config(tmp_path / "run", lengths=[20]), loaded)
    assert not (tmp_path / "run").exists()


def killed(loaded, given, after):
    """A run that is killed behind so many batches."""

    def stop(line):
        told.append(line)
        if len(told) == after:
            raise KeyboardInterrupt

    told = []
    with pytest.raises(KeyboardInterrupt):
        run.run(given, loaded, stop, batch=1)


def test_a_killed_run_is_reported_with_what_it_has(loaded, tmp_path, capsys):
    given = config(tmp_path, suites=["chain"])
    learn_words(given, loaded[1])
    killed(loaded, given, 1)
    capsys.readouterr()
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write('{"id": "ä'.encode()[:-1])  # cut within a character
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "results.md").read_text()
    assert "**The run is not finished: 1 of 2 planned samples are there.**" in page
    assert page in capsys.readouterr().out and "* dtype: float32" in page
    assert len(run.run(given, loaded, batch=1)) == 2
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "other")]) == 0
    assert "not finished" not in (tmp_path / "other" / "results.md").read_text()
    assert records.read(tmp_path / "samples.jsonl").config == given


def test_a_run_of_erasing_is_reported_alone(loaded, tmp_path, capsys):
    given = config(tmp_path / "one", suites=["chain"])
    records.start(tmp_path / "one" / "samples.jsonl", given, {}, [])
    (tmp_path / "two").mkdir()
    runs = [str(tmp_path / name) for name in ("one", "two")]
    assert main(["report", *runs, "--output", str(tmp_path)]) == 2
    assert f"run '{tmp_path}/one' is of erasing: give it alone" in capsys.readouterr().err


def test_other_contents_under_the_same_names_are_refused(loaded, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("The fox ran over the hill. It was late at night. " * 40)
    given = config(tmp_path / "run", suites=["chain"], haystacks=[f"file:{book}"], samples=1)
    path = tmp_path / "run" / "samples.jsonl"
    learn_words(given, loaded[1])
    killed(loaded, given, 1)
    other = kvjax.Decoder.random(CONFIG, jax.random.key(2)), loaded[1]
    with pytest.raises(ValueError, match=r"results of another model \(float32\), .* than is there"):
        run.run(given, other, batch=1)
    book.write_text("The dog ran over the hill. It was late at night. " * 40)
    with pytest.raises(ValueError, match=r"another haystack file:book\.txt than is there now"):
        run.run(given, loaded, batch=1)
    first, rest = path.read_text().split("\n", 1)
    header = json.loads(first)
    for name in ("identity", "environments", "planned"):
        del header[name]
    path.write_text(json.dumps({**header, "commit": "old"}) + "\n" + rest)
    # A journal of before there were identities: nothing can be said against it.
    run.run(dataclasses.replace(given, samples=2), loaded, batch=1)
    finished = records.read(path)
    assert [one.environment for one in finished.results.values()] == [0, 1]
    assert finished.environments[0] == {"commit": "old"}
    assert finished.environment["commit"].startswith("old / ")
    assert "dtype" in finished.environment["differs between resumptions"]


def test_another_format_and_another_writer_are_refused(loaded, tmp_path):
    given, path = config(tmp_path, suites=["chain"]), tmp_path / "samples.jsonl"
    with durable.locked(path), pytest.raises(ValueError, match="another command is writing"):
        run.run(given, loaded)
    path.write_text(json.dumps({"format": "erasing-1", "config_hash": given.hash}) + "\n")
    with pytest.raises(ValueError, match="has format erasing-1, this version writes erasing-2"):
        run.run(given, loaded)
