"""The paper's numbers as data: against each other, against the paper's text, and beside results of our own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from medtokenbudget.config import BUDGETS, PAPER_METHODS
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.runs import paper
from medtokenbudget.runs.run import summarize
from tests.runs import simulate


def test_the_main_table_is_a_part_of_the_complete_sweep() -> None:
    columns = [BUDGETS.index(budget) for budget in paper.MAIN_BUDGETS]
    for method, row in paper.MAIN.items():
        assert row[:-1] == tuple(paper.ISIC_SWEEP[method][i] for i in columns)
    assert paper.CURRICULUM["LATS"] == paper.MAIN["LATS"][:-1]
    for method, (accuracy, _, retention) in paper.SIGNALS.items():
        assert (accuracy, retention) == (paper.MAIN[method][2], paper.MAIN[method][-1])


def test_paired_differences_are_the_differences_of_the_means_to_rounding() -> None:
    for (budget, method), row in paper.PAIRED.items():
        for metric, cell in zip(paper.PAIRED_METRICS, row):
            column = paper.ROBUSTNESS_METRICS.index(metric)
            ours, theirs = paper.ROBUSTNESS[budget, "LATS"][column], paper.ROBUSTNESS[budget, method][column]
            if cell is None:
                assert theirs is None
                continue
            assert ours is not None
            assert theirs is not None
            slack = 0.11 if metric == "retention" else 0.016  # each mean is rounded to one or to two decimals
            assert cell[0] == pytest.approx(ours[0] - theirs[0], abs=slack)


def test_prevalence_is_patches_over_the_grid() -> None:
    for patches, prevalence in paper.PREVALENCE.values():
        assert prevalence == pytest.approx(100 * patches / paper.GRID_PATCHES, abs=0.11)


def test_class_counts_add_up_to_the_subsets() -> None:
    for subset, row in paper.SUBSETS.items():
        assert sum(row) == paper.SUBSET_SIZES[subset]
    assert dict(zip(paper.CLASSES, next(iter(paper.SUBSETS.values()))))["MEL"] == 910


def test_mask_free_precision_is_enrichment_times_prevalence() -> None:
    for row in paper.MASK_FREE_CONTROL.values():
        precision, enrichment = row[-2][0], row[-1][0]
        assert precision == pytest.approx(enrichment * paper.PREVALENCE["Mean"][1], abs=0.25)


def test_deviations_of_the_paper_are_sample_deviations() -> None:
    """Smallest, largest and mean of three seeds give the third, hence the deviation: with ddof = 1, not 0."""
    for budget, (low, high) in paper.MASK_FREE_RETENTION_RANGE.items():
        mean, deviation = paper.MASK_FREE_CONTROL[budget][3]
        seeds = [low, high, 3 * mean - low - high]
        assert np.std(seeds, ddof=1) == pytest.approx(deviation, abs=0.15)
        assert abs(np.std(seeds) - deviation) > 2


def test_no_selector_of_the_paper_is_above_the_ceiling() -> None:
    for (budget, _), row in paper.ROBUSTNESS.items():
        assert row[3] is None or row[3][0] <= paper.CEILING[budget]
    for curve in paper.CONTROL_RETENTION.values():
        assert all(value <= paper.CEILING[budget] for budget, value in curve.items())


def test_every_number_stands_in_the_text_of_the_paper(shared: Path) -> None:
    text = (shared / "paper" / "paper.tex").read_text()
    rows = [re.sub(r"\\textbf\{([^}]*)\}", r"\1", line) for line in text.splitlines() if line.rstrip().endswith(r"\\")]
    squeezed = [re.sub(r"\s+", " ", row) for row in rows]
    for sweep in (paper.ISIC_SWEEP, paper.KVASIR_SWEEP):
        for method, values in sweep.items():
            assert f"{method} & {' & '.join(str(v) for v in values)} \\\\" in squeezed
    for (budget, method), cells in paper.ROBUSTNESS.items():
        for cell in cells[:3]:
            assert cell is not None
            assert any(row.startswith(f"{budget} & {method} ") and f"{cell[0]:.2f}{{\\pm}}{cell[1]:.2f}" in row for row in squeezed)
    for (budget, method), cells in paper.PAIRED.items():
        start = f"{budget} & LATS--{method} "
        for cell in cells:
            assert cell is None or any(r.startswith(start) and f"{cell[0]:.2f}{{\\pm}}{cell[1]:.2f}" in r for r in squeezed)
    for budget, spreads in paper.MASK_FREE_CONTROL.items():
        for mean, deviation in spreads[:-1]:
            assert any(r.startswith(f"{budget} &") and f"{mean:.1f}{{\\pm}}{deviation:.1f}" in r for r in squeezed)


def test_all_seven_methods_have_our_names() -> None:
    assert set(paper.table("main")["method"]) == set(PAPER_METHODS)
    assert len(paper.table("main").query("metric == 'accuracy'")) == 70


@pytest.mark.parametrize("study", paper.STUDIES)
def test_each_table_is_tidy(study: str) -> None:
    table = paper.table(study)
    assert list(table.columns) == ["method", "budget", "metric", "paper", "paper_sd"]
    assert not table.duplicated(["method", "budget", "metric"]).any()
    assert table["paper"].notna().all()


def test_our_results_stand_beside_the_papers() -> None:
    frame = simulate.sweep({"lats": {}, "random": {}, "center": {}}, (42, 43, 44), (0.1, 0.3), n=20).assign(study="robustness")
    ours = summarize(frame, simulate.CLASSES)
    table = paper.beside_paper(ours, "robustness")
    row = table.query("method == 'lats' and budget == 0.3 and metric == 'accuracy'").iloc[0]
    values = 100 * ours.query("method == 'lats' and budget == 0.3")["accuracy"]
    assert (row["paper"], row["paper_sd"], row["seeds"]) == (80.38, 0.18, 3)
    assert row["ours"] == pytest.approx(values.mean())
    assert row["ours_sd"] == pytest.approx(values.std(ddof=1))
    assert row["difference"] == pytest.approx(values.mean() - 80.38)
    missing = table.query("method == 'tome' and budget == 0.3 and metric == 'accuracy'").iloc[0]
    assert np.isnan(missing["ours"])
    control = table.query("method == 'center' and budget == 0.3 and metric == 'retention'").iloc[0]
    assert np.isnan(control["paper"])
    assert control["ours"] > 0
    assert "center" not in set(paper.beside_paper(ours, "robustness", controls=False)["method"])


def test_datasets_are_kept_apart() -> None:
    frame = simulate.sweep({"lats": {}}, (42,), (0.3,), n=20)
    both = pd.concat([frame, frame.assign(dataset="another"), frame.assign(view="off-center")])
    table = paper.beside_paper(summarize(both, simulate.CLASSES), "main")
    assert table.groupby("dataset").size().nunique() == 1
    assert set(table["dataset"]) == {"made-up", "another"}


def test_a_study_without_numbers_is_named() -> None:
    with pytest.raises(UnknownNameError, match="robustness"):
        paper.table("robustnes")
    with pytest.raises(RequestError, match="no rows of study 'signals'"):
        paper.beside_paper(summarize(simulate.sweep({"lats": {}}, (42,), (0.3,), n=20), simulate.CLASSES), "signals")
