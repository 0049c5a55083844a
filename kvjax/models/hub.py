"""Checkpoints of the Hugging Face hub, downloaded as plain files."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Weights, configs and tokenizers only: never pickles, never code.
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/model."""
    return HUB_ID.fullmatch(name) is not None


def download(name: str) -> Path:
    """The local directory of a hub checkpoint, from the cache or the network.

    Raises `ConnectionError` with one line when the hub does not give it.
    """
    try:
        hub = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(name, allow_patterns=PATTERNS, etag_timeout=5))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise ConnectionError(f"{type(error).__name__}: {lines[0]}") from error
