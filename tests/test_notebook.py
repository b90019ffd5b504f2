"""`examples/quickstart.ipynb` runs from the first cell to the last, and its stored outputs are small and what a run gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'dev'")
NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def stored() -> Any:
    return nbformat.read(NOTEBOOK, 4)


def texts(notebook: Any) -> list[str]:
    """What each code cell printed and showed, without its standard error."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [[output for output in cell.outputs if output.get("name") != "stderr"] for cell in cells]
    return ["".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs) for outputs in shown]


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+(?:\.\d+)?", text)]


def test_the_stored_outputs_are_complete_small_and_without_warnings(stored: Any) -> None:
    nbformat.validate(stored)
    cells = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/jpeg" in o.get("data", {}) or "image/png" in o.get("data", {}) for c in cells for o in c.outputs) == 3
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert NOTEBOOK.stat().st_size < 150_000


def test_the_links_of_the_notebook_lead_somewhere(stored: Any) -> None:
    targets = [t for c in stored.cells if c.cell_type == "markdown" for t in re.findall(r"\]\((?!https?:)([^)#]+)", c.source)]
    assert targets
    assert all((NOTEBOOK.parent / target).exists() for target in targets)


@pytest.mark.slow
def test_the_notebook_runs_and_gives_what_is_stored(stored: Any, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'dev'")
    before, fresh = texts(stored), nbformat.read(NOTEBOOK, 4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    for old, new in zip(before, texts(fresh), strict=True):
        assert re.sub(r"\d", "", old) == re.sub(r"\d", "", new)
        assert numbers(new) == pytest.approx(numbers(old), abs=0.03, rel=0.03)
    told = "".join(texts(fresh))
    router, center = (float(re.search(rf"{name}\s+[\d.]+\s+([\d.]+)", told)[1]) for name in ("packaged router", "center"))
    assert router > center + 0.2
