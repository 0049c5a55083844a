"""The Python on the documentation's own pages runs as it stands, page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvjax
from kvjax.models.checkpoint import DEFAULT_MODEL
from kvjax.policies import registry

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / "index.md", *sorted((DOCS / "concepts").glob("*.md"))]
PAGES += sorted((DOCS / "howto").glob("*.md"))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


WITH_PYTHON = [page for page in PAGES if python_blocks(page)]


def test_pages_have_examples():
    names = {page.stem for page in WITH_PYTHON}
    assert {"index", "model", "policy", "data"} <= names


@pytest.mark.model
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_examples_of_a_page_run_one_after_the_other(page, monkeypatch, tmp_path, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    load = kvjax.load
    named = f'kvjax.load("{DEFAULT_MODEL}")'
    default = request.getfixturevalue("default_model") if named in page.read_text() else None

    def loaded_once(name, **options):
        return default if name == DEFAULT_MODEL and not options else load(name, **options)

    monkeypatch.setattr(kvjax, "load", loaded_once)
    namespace: dict = {}
    for block in python_blocks(page):
        exec(block, namespace)
