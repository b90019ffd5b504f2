"""The learned selector and the head that docs/how-to/ shows, run from that text through sweep and report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import medtokenbudget as mtb
from medtokenbudget.api import save_model
from medtokenbudget.runs import sweep
from medtokenbudget.runs.execution import Execution
from medtokenbudget.runs.results import read_results
from medtokenbudget.routing import registry as selectors
from medtokenbudget.heads import registry as heads
from tests.conftest import REPOSITORY
from tests.drawn import Drawn, quick

PAGES = [REPOSITORY / "docs" / "how-to" / name for name in ("learned-selector.md", "head.md")]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(selectors.SELECTORS, "_classes", dict(selectors.SELECTORS._classes))
    monkeypatch.setattr(heads.HEADS, "_classes", dict(heads.HEADS._classes))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(r"(?<!-->\n)```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.slow
def test_a_learned_selector_of_60_lines_runs_through_sweep_and_report(blocks: list[str], drawn: Drawn, tmp_path: Path) -> None:
    assert len(blocks[0].splitlines()) <= 65
    exec(blocks[0], {"__name__": "their_module"})
    methods = ("linear-scorer", "linear-scorer:mask-free", "linear-scorer:lesion-first", "center")
    paths = drawn.manifest_path, drawn.store_path, tmp_path / "run"
    sweep(*paths, methods=methods, budgets=(0.3,), seeds=(42,), config=quick("paper", *methods), execution=Execution(jobs=1))
    results = read_results(tmp_path / "run" / "results.csv")
    assert set(results["method"]) == set(methods)
    assert results["retention"].notna().all()
    mtb.report(tmp_path / "run")
    assert "linear-scorer:lesion-first" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_head_that_reads_tokens_runs_through_sweep_and_report(blocks: list[str], drawn: Drawn, tmp_path: Path) -> None:
    exec(blocks[1], {"__name__": "their_module"})
    out = tmp_path / "run"
    sweep(
        drawn.manifest_path,
        drawn.store_path,
        out,
        methods=("lats", "lats:lesion-first", "random", "tome", "query-pool+clam-mb"),
        budgets=(0.3,),
        seeds=(42,),
        config=quick("paper", "lats", "random"),
        execution=Execution(jobs=1),
        heads=("max-pool",),
    )
    results = read_results(out / "results.csv")
    expected = {"lats+max-pool", "lats+max-pool:lesion-first", "random+max-pool", "tome+max-pool", "query-pool+clam-mb"}
    assert set(results["method"]) == expected
    assert results["accuracy"].notna().all()
    mtb.report(out)
    assert "max-pool" in (out / "report.html").read_text(encoding="utf-8")
    # The saved model reads tokens too.
    folder = save_model(out)
    assert folder is not None
    batch = next(iter(drawn.store.batches(range(4), 4)))
    assert mtb.load(folder).classify(batch, (0.3, 0.5), "tome+max-pool").shape == (4, 2, len(drawn.manifest.classes))
