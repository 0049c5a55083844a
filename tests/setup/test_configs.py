"""Every config of the repository is one that its command takes."""

from __future__ import annotations

from pathlib import Path

import pytest

import eval.config
import train.config
from eval import fields
from eval.erasing import config as erasing

CONFIGS = sorted(Path("configs").glob("*.yaml"))


def test_there_are_some():
    assert len(CONFIGS) > 10


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_read(path):
    content = fields.yaml_file(path)
    if "module" in content:
        assert train.config.load(path).steps > 0
    elif erasing.is_erasing(content):
        assert erasing.load(path).methods
    else:
        assert eval.config.load_all(path)
