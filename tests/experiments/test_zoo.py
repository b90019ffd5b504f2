"""Every kind of selector through a sweep: trained, judged, reported, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import medtokenbudget as mtb
from medtokenbudget.experiments import sweep
from medtokenbudget.experiments.execution import Execution
from medtokenbudget.experiments.methods import Method
from medtokenbudget.experiments.run import RunInfo
from medtokenbudget.experiments.trained import load_unit
from medtokenbudget.experiments.units import Unit
from tests.drawn import Drawn, quick

pytestmark = pytest.mark.slow

SOFT = ("tokenlearner", "tc-ssa", "query-pool:lesion-first")
HARD = ("evit", "dynamicvit-package:lesion-first")
KEPT = ("ats", "cropr:mask-free", "dynamicvit", "sparselearn:lesion-first", "box-prior")


@pytest.fixture(scope="module")
def run(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo")
    methods = (*SOFT, *HARD, *KEPT)
    sweep(
        drawn.manifest_path,
        drawn.store_path,
        out,
        methods=methods,
        budgets=(0.3, 0.5),
        seeds=(42,),
        config=quick("paper"),
        execution=Execution(jobs=1),
    )
    return out


def test_every_method_is_measured_by_what_it_can_lose(run: Path) -> None:
    results = mtb.experiments.results.read_results(run / "results.csv")
    for methods, measured in (
        (SOFT, {"lesion_mass"}),
        (HARD, {"purity", "lesion_dominated"}),
        (KEPT, {"retention", "precision"}),
    ):
        rows = results[results["method"].isin(methods)]
        assert set(rows["method"]) == set(methods)
        for name in ("lesion_mass", "purity", "lesion_dominated", "retention", "precision"):
            assert rows[name].notna().all() if name in measured else rows[name].isna().all(), name
    assert results["accuracy"].notna().all()


def test_a_finished_unit_is_loaded_with_its_trained_selector(run: Path, drawn: Drawn) -> None:
    info = RunInfo.read(run)
    for method in ("cropr:mask-free", "tc-ssa"):
        classifier = load_unit(info, Unit(Method.parse(method), 42), drawn.store.dim)
        assert classifier is not None
        batch = next(iter(drawn.store.batches(range(4), 4)))
        assert classifier(batch, 0.5).shape == (4, len(info.classes))


@pytest.mark.slow
def test_the_report_of_such_a_run_is_written(run: Path) -> None:
    mtb.report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "TokenLearner" in page
    assert "Cropr" in page
