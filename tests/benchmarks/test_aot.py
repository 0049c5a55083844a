"""The table of compiled programs: what follows from a row, and that a misfit is never silent."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import aot


def row(program="prefill", model="llama-3.1-8b", name="v5e-16", **changes):
    found = {
        "model": model,
        "slice": name,
        "program": program,
        "argument_bytes": 2 * 2**30,
        "temporary_bytes": 3 * 2**30,
        "peak_bytes": 5 * 2**30,
        "flops": 1e12,
        "collective_bytes": 2**30,
        "unknown_loops": 0,
        "commit": "abc",
        "jax": "1",
        "libtpu": "2",
    }
    return found | changes


def test_the_roofline_is_the_longest_of_three_times():
    found = aot.completed(row())
    part = aot.SLICES["v5e-16"]
    attention = 4 * 2 * 32 * 32 * 128 * (32 * 1024) ** 2 / 16  # 4 rows, all layers and heads
    assert found["attention_flops"] == attention
    assert found["seconds"]["compute"] == (1e12 + attention) / part.flops
    assert found["seconds"]["memory"] == 8 * 2**30 / part.bandwidth
    assert found["seconds"]["network"] == 2**30 / part.link
    assert found["bound_by"] == "compute" and found["fits"]
    assert found["roofline_seconds"] == max(found["seconds"].values())


def test_attention_is_what_its_formula_says():
    model = aot.MODELS["qwen3-8b"]
    one_pass = 16 * 2 * 36 * 32 * 128 * 4096**2  # rows, layers and heads, tokens
    assert aot.attention_flops("retention", model) == 5.5 * one_pass
    assert aot.attention_flops("indexmem", model) == 4.5 * one_pass
    assert aot.attention_flops("eraser", model) == 2 * one_pass
    assert aot.attention_flops("decode", model) == 0
    chunks = 2 * 4 * 36 * 32 * 128 * (1152 + 1024) * 2**20
    assert aot.attention_flops("chunked-1m", model) == chunks


def run(monkeypatch, tmp_path, measured, *arguments):
    monkeypatch.setattr(aot, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["aot", "--out", str(tmp_path), *arguments])
    return aot.main()


CELL = ("--models", "qwen3-8b", "--slices", "v5e-16", "--programs", "prefill,decode")


@pytest.mark.parametrize(
    "misfit", [{"peak_bytes": 2**40}, {"refused": "RESOURCE_EXHAUSTED: out of HBM"}]
)
def test_a_program_that_does_not_fit_is_shown_and_fails_the_run(monkeypatch, tmp_path, misfit):
    def measured(program, model, name):
        return row(program, model, name, **(misfit if program == "decode" else {}))

    assert run(monkeypatch, tmp_path, measured, *CELL) == 1
    (good, bad) = json.loads((tmp_path / "aot.json").read_text())
    assert (good["fits"], bad["fits"]) == (True, False)
    lines = (tmp_path / "aot.md").read_text().splitlines()
    assert {line.count("|") for line in lines[4:]} == {15}
    assert "**no**" in lines[-1] and "decode" in lines[-1]
    assert "| yes |" in lines[-2]


def test_rows_that_are_not_asked_for_stay_and_unknown_loops_show(monkeypatch, tmp_path):
    def measured(program, model, name):
        return row(program, model, name, unknown_loops=1)

    (tmp_path / "aot.json").write_text(json.dumps([row("decode"), row("decode", "qwen3-8b")]))
    assert run(monkeypatch, tmp_path, measured, *CELL) == 0
    rows = json.loads((tmp_path / "aot.json").read_text())
    names = [(one["model"], one["program"]) for one in rows]
    assert names == [
        ("llama-3.1-8b", "decode"), ("qwen3-8b", "prefill"), ("qwen3-8b", "decode"),
    ]  # fmt: skip
    assert (tmp_path / "aot.md").read_text().count("≥ 1.00 GiB") == 2


def test_unknown_names_are_refused_with_those_that_there_are(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"--models='gpt': allowed: llama-3\.1-8b"):
        run(monkeypatch, tmp_path, row, "--models", "gpt")
