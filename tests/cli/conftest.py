"""Running the command inside the test's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.models import orbax
from tests.models.small import random_model, small_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    status: int
    out: str
    err: str


type Run = Callable[..., Finished]


@pytest.fixture
def run(capsys) -> Run:
    """`run("generate", "--prompt", ...)` gives exit status, standard output and error."""

    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as left:  # --help and --version
            status = int(left.code or 0)
        captured = capsys.readouterr()
        return Finished(status=status, out=captured.out, err=captured.err)

    return call


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory):
    """A Hugging Face directory with random weights and no tokenizer; not to be changed."""
    config = kvjax.ModelConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )
    model = kvjax.Decoder.random(config, jax.random.key(0))
    return orbax.export_hf(model, None, tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model with random weights and a tokenizer, as `kvjax.load` reads it; not to be changed."""
    path = tmp_path_factory.mktemp("model") / "small"
    orbax.save(random_model(), small_tokenizer(), path)
    return path
