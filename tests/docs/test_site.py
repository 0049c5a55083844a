"""The documentation builds without a warning, and names everything that it says it names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import kvjax

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


class _Ids(HTMLParser):
    """The ids of a page, and where its scripts, styles and images come from."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag in ("script", "img"):
            self.loaded.append(given.get("src") or "")
        if tag == "link" and given.get("rel") == "stylesheet":
            self.loaded.append(given.get("href") or "")


def parsed(page: Path) -> _Ids:
    found = _Ids()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def mkdocs(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # A directory at the front of the path in which no jax can be imported.
    blocked = site.parent / "blocked"
    (blocked / "jax").mkdir(parents=True)
    (blocked / "jax" / "__init__.py").write_text("raise ImportError('the site needs no JAX')\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site]
    environment = os.environ | {"PYTHONPATH": str(blocked), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly from the sources and without importing JAX."""
    target = tmp_path_factory.mktemp("docs") / "site"
    done = mkdocs(ROOT / "mkdocs.yml", target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "index",
        "concepts/restkv",
        "concepts/retention",
        "concepts/indexmem",
        "concepts/kveraser",
        "howto/model",
        "howto/policy",
        "howto/data",
        "howto/pod",
        "reference/decoding",
        "reference/training",
        "reference/kernels",
        "results/index",
        "training",
    ],
)
def test_key_pages_are_there(site, page):
    assert (site / f"{page}.html").stat().st_size > 5000


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    ids = set().union(*(parsed(page).ids for page in (site / "reference").glob("*.html")))
    assert {f"kvjax.{name}" for name in kvjax.__all__} <= ids


@pytest.mark.slow
def test_equations_stay_readable_as_tex(site):
    for name in ("restkv", "retention", "indexmem", "kveraser"):
        text = (site / "concepts" / f"{name}.html").read_text(encoding="utf-8")
        assert text.count('<div class="arithmatex">\\[') >= 3
        assert "$$" not in text


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere_but_mathjax(site):
    for page in site.rglob("*.html"):
        elsewhere = [address for address in parsed(page).loaded if "//" in address]
        assert all("mathjax" in address for address in elsewhere), page


@pytest.mark.slow
@pytest.mark.parametrize("target", ["missing.md", "theory.md#missing", "../README.md"])
def test_a_broken_link_fails_the_build(tmp_path, target):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n[there]({target})\n")
    (tmp_path / "docs" / "theory.md").write_text("# Theory\n")
    validation = re.search(
        r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    config = tmp_path / "mkdocs.yml"
    config.write_text("site_name: x\n" + validation[0])
    done = mkdocs(config, tmp_path / "site")
    assert done.returncode != 0
    assert "strict mode" in done.stdout + done.stderr


def test_every_policy_has_a_heading():
    text = (DOCS / "reference" / "methods.md").read_text()
    assert tuple(re.findall(r"^## `(.+)`$", text, re.MULTILINE)) == kvjax.policy_names()


def test_every_operation_is_in_the_reference():
    text = (DOCS / "reference" / "kernels.md").read_text()
    for api in (ROOT / "kernels_pallas").glob("*/api.py"):
        assert f"::: kernels_pallas.{api.parent.name}." in text, api.parent.name


def test_every_notebook_is_listed():
    text = (DOCS / "howto" / "notebooks.md").read_text()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"`{path.name}`" in text


def test_links_of_the_readme_lead_to_files_and_headings():
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / "README.md").read_text()):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).is_file(), target
        assert not anchor, f"{target}: checked are files only"


def test_files_that_pages_name_exist():
    named = r"`((?:configs|launch|kvjax|train|eval|notebooks|kernels_pallas)/[\w/.]+\.\w+)`"
    for page in DOCS.rglob("*.md"):
        for path in re.findall(named, page.read_text()):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"


def test_nothing_is_fetched_for_the_theme():
    text = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(text)["theme"]["font"] is False
