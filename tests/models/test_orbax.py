"""Orbax checkpoints restore to the bit, and nothing half written is left behind."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.checkpoint import load
from kvjax.models.orbax import export_hf, save
from tests.models.small import CONFIGS, random_model, small_tokenizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_saved_model_loads_equal_to_the_bit(name, dtype, tmp_path):
    model, tokenizer = random_model(name, dtype), small_tokenizer()
    loaded = load(save(model, tokenizer, tmp_path / "model"))
    assert loaded.model.config == model.config
    assert loaded.model.dtype == jnp.dtype(dtype)
    for key, value in model.parameters.items():
        one, two = (np.asarray(v).view(np.uint8) for v in (value, loaded.model.parameters[key]))
        np.testing.assert_array_equal(one, two, err_msg=key)
    assert loaded.model.fingerprint() == model.fingerprint()
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert loaded.tokenizer.end_tokens == tokenizer.end_tokens


def test_another_dtype_can_be_asked_for(tmp_path):
    path = save(random_model(), None, tmp_path / "model")
    loaded = load(path, dtype=jnp.bfloat16)
    assert loaded.model.dtype == jnp.bfloat16 and loaded.tokenizer is None


@pytest.mark.parametrize("write", [save, export_hf])
def test_an_existing_directory_is_never_overwritten(write, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"):
        write(random_model(), None, tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine.txt"]


@pytest.mark.parametrize("write", [save, export_hf])
def test_a_failure_leaves_nothing_behind(write, tmp_path, monkeypatch):
    tokenizer = small_tokenizer()
    monkeypatch.setattr(tokenizer, "save", lambda directory: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(random_model(), tokenizer, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_damaged_checkpoints_are_named(tmp_path):
    path = save(random_model(), None, tmp_path / "model")
    card = json.loads((path / "kvjax.json").read_text())
    (path / "kvjax.json").write_text(json.dumps(card | {"fingerprint": "0" * 16}))
    with pytest.raises(ValueError, match="not those that were saved"):
        load(path)
    (path / "kvjax.json").write_text(json.dumps(card | {"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load(path)
    (path / "kvjax.json").write_text(json.dumps(card))
    for file in (path / "weights").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(ValueError, match="damaged Orbax checkpoint") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_configs_keep_every_field(tmp_path):
    for name in CONFIGS:
        path = save(random_model(name), None, tmp_path / name)
        assert load(path).model.config == CONFIGS[name]
