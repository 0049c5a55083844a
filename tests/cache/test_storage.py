"""A stored cache comes back to the bit, and only to the model and policy that filled it."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
from kvjax.cache.storage import load_cache, read_card, save_cache, settings_hash
from tests.models.small import random_model

PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 300, 40)]
POLICIES = {
    "knorm": kvjax.policy("knorm"),
    "h2o": kvjax.policy("h2o"),
    "snapkv": kvjax.policy("snapkv", window=6, decode_interval=4),
}


@pytest.fixture(scope="module")
def model() -> kvjax.Decoder:
    return random_model()


def filled(model: kvjax.Decoder, policy: kvjax.Policy, **options: object):
    return kvjax.prefill(model, [PROMPT], policy=policy, budget=12, room=4, **options)[1]


def assert_equal(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_comes_back_to_the_bit(model, name, tmp_path):
    cache = filled(model, POLICIES[name])
    path = save_cache(cache, tmp_path / "c.safetensors", model=model, policy=POLICIES[name])
    assert_equal(load_cache(path, model=model, policy=POLICIES[name]), cache)
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_paged_cache_comes_back_to_the_bit(model, tmp_path):
    policy = POLICIES["snapkv"]
    cache = filled(model, policy, pages=4)
    assert isinstance(cache, kvjax.PagedCache)
    path = save_cache(cache, tmp_path / "c", model=model, policy=policy)
    assert_equal(load_cache(path, model=model, policy=policy), cache)


def test_bfloat16_survives(tmp_path):
    model = random_model("llama", "bfloat16")
    cache = filled(model, POLICIES["knorm"])
    path = save_cache(cache, tmp_path / "c", model=model, policy=POLICIES["knorm"])
    found = load_cache(path, model=model, policy=POLICIES["knorm"])
    assert found.keys.dtype == jnp.bfloat16
    assert_equal(found, cache)


def test_a_loaded_cache_decodes_as_before(model, tmp_path):
    policy = POLICIES["snapkv"]
    logits, cache = kvjax.prefill(model, [PROMPT], policy=policy, budget=12)
    path = save_cache(cache, tmp_path / "c", model=model, policy=policy, budget=12)
    again = load_cache(path, model=model, policy=policy, budget=12)
    options = {"max_new_tokens": 6, "policy": policy, "budget": 12}
    left = kvjax.generate(model, cache, logits, **options)
    right = kvjax.generate(model, again, logits, **options)
    np.testing.assert_array_equal(left.tokens, right.tokens)


def test_the_record_is_kept(model, tmp_path):
    record = {"turns": [["hello", 3]], "none": None}
    policy = POLICIES["knorm"]
    path = save_cache(
        filled(model, policy), tmp_path / "c", model=model, policy=policy, record=record
    )
    assert read_card(path).record == record


def test_another_model_is_refused(model, tmp_path):
    policy = POLICIES["knorm"]
    path = save_cache(filled(model, policy), tmp_path / "c", model=model, policy=policy)
    other = random_model("llama3")
    with pytest.raises(ValueError, match=f"{model.fingerprint()}.*{other.fingerprint()}"):
        load_cache(path, model=other, policy=policy)


@pytest.mark.parametrize(
    ("given", "both"),
    [
        (kvjax.policy("keydiff"), ("'snapkv'", "'keydiff'")),
        (kvjax.policy("snapkv", window=7, decode_interval=4), ("scorer.window=6", "=7")),
        (kvjax.policy("snapkv", window=6, decode_interval=4, sinks=9), ("sinks=0", "=9")),
        (kvjax.policy("snapkv", window=6, decode_interval=5), ("interval=4", "=5")),
    ],
)
def test_another_policy_or_setting_is_refused_by_both_names(model, given, both, tmp_path):
    policy = POLICIES["snapkv"]
    path = save_cache(filled(model, policy), tmp_path / "c", model=model, policy=policy)
    with pytest.raises(ValueError) as refused:
        load_cache(path, model=model, policy=given)
    for part in both:
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_other_learned_arrays_are_refused(model, tmp_path):
    policy, params = POLICIES["knorm"], {"gate": jnp.arange(3.0)}
    path = save_cache(
        filled(model, policy), tmp_path / "c", model=model, policy=policy, params=params
    )
    load_cache(path, model=model, policy=policy, params=params)
    for other in (None, {"gate": jnp.arange(3.0) + 1}, {"gates": jnp.arange(3.0)}):
        with pytest.raises(ValueError, match="learned arrays"):
            load_cache(path, model=model, policy=policy, params=other)


def test_another_budget_is_refused(model, tmp_path):
    policy = POLICIES["knorm"]
    cache = filled(model, policy)
    path = save_cache(cache, tmp_path / "c", model=model, policy=policy, budget=12)
    load_cache(path, model=model, policy=policy, budget=12)
    with pytest.raises(ValueError, match=r"budget 12.*13"):
        load_cache(path, model=model, policy=policy, budget=13)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(model, keep, tmp_path):
    policy = POLICIES["knorm"]
    path = save_cache(filled(model, policy), tmp_path / "c", model=model, policy=policy)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(ValueError, match="truncated") as refused:
        load_cache(path, model=model, policy=policy)
    assert "\n" not in str(refused.value)


def test_foreign_files_are_refused(model, tmp_path):
    path = tmp_path / "c"
    path.write_bytes(b"PK\x03\x04 not a tensor file, whatever its name says")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_card(path)
    save_file({"x": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="not a cache"):
        read_card(path)
    with pytest.raises(FileNotFoundError):
        read_card(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError):
        read_card(tmp_path)


def test_an_edited_header_is_refused(model, tmp_path):
    policy = POLICIES["knorm"]
    cache = filled(model, policy)
    path = save_cache(cache, tmp_path / "c", model=model, policy=policy)
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        card = json.loads(file.metadata()["kvjax-cache"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changes = (
        ({"version": 99}, "format 99"),
        ({"tree": {"kind": "os.system", "fields": {}}}, "damaged"),
        ({"tree": {"kind": "PaddedCache", "fields": {}}}, "damaged"),
        ({"tree": {"tensor": "nothing"}}, "damaged"),
        ({"model": None}, "model None"),
    )
    for change, message in changes:
        save_file(tensors, path, metadata={"kvjax-cache": json.dumps(card | change)})
        with pytest.raises(ValueError, match=message):
            load_cache(path, model=model, policy=policy)
    save_file(tensors, path, metadata={"kvjax-cache": "{"})
    with pytest.raises(ValueError, match="damaged"):
        load_cache(path, model=model, policy=policy)


def test_a_failed_save_leaves_the_old_file(model, tmp_path):
    policy = POLICIES["knorm"]
    cache = filled(model, policy)
    path = save_cache(cache, tmp_path / "c", model=model, policy=policy)
    before = path.read_bytes()
    state = dataclasses.replace(cache.policy_state, layer={"x": jax.random.key(0)})
    with pytest.raises(ValueError, match="cannot be stored"):
        save_cache(dataclasses.replace(cache, policy_state=state), path, model=model, policy=policy)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_the_settings_hash_sees_every_field():
    policy = kvjax.policy("snapkv")
    same = kvjax.policy("snapkv")
    assert settings_hash(policy) == settings_hash(same)
    others = [
        kvjax.policy("snapkv", window=31),
        kvjax.policy("snapkv", sinks=1),
        kvjax.policy("snapkv", decode_interval=1),
        kvjax.policy("snapkv", pooling="max"),
    ]
    assert len({settings_hash(p) for p in (policy, *others)}) == 5
