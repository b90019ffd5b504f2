"""The paper's numbers as data: against each other, against the paper's text, and beside results of our own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from medtokenbudget.config import PAPER_METHODS
from medtokenbudget.data.readers import ISIC_CLASSES
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.runs import paper
from medtokenbudget.runs.run import summarize
from tests.runs import simulate

PAPER_NAMES = {
    "no-pruning": "NoPruning",
    "random": "Random",
    "norm": "NormBased",
    "tome": "ToMe",
    "attention-entropy": "AttnEnt",
    "local-contrast": "LocalCtr",
    "lats": "LATS",
    "lats:mask-free": "LATS_mf",
    "lats:fixed-0.5": "Fixed",
}


def value(study: str, method: str, budget: float, metric: str) -> tuple[float, float]:
    table = paper.table(study)
    row = table[(table["method"] == method) & (table["budget"] == budget) & (table["metric"] == metric)].iloc[0]
    return row["paper"], row["paper_sd"]


def test_the_tables_agree_with_each_other() -> None:
    for study in ("signals", "curriculum"):
        for row in paper.table(study).itertuples():
            if row.metric != "macro_f1" and row.method != "lats:fixed-0.5":
                assert row.paper == value("main", row.method, row.budget, row.metric)[0]
    sizes = paper.prevalence_table()
    assert sizes["prevalence"].to_numpy() == pytest.approx(100 * sizes["patches"].to_numpy() / 256, abs=0.11)
    mean = sizes.set_index("statistic").loc["Mean", "prevalence"]
    for budget in (0.1, 0.3, 0.5):
        precision, enrichment = (value("mask-free", "lats:mask-free", budget, metric)[0] for metric in ("precision", "enrichment"))
        assert precision == pytest.approx(enrichment * mean, abs=0.25)
    subsets = paper.subsets()
    assert [sum(counts.values()) for counts in subsets.values()] == [5067, 155, 617]
    assert all(tuple(counts) == ISIC_CLASSES for counts in subsets.values())
    assert subsets["Full validation"]["MEL"] == 910


def test_deviations_of_the_paper_are_sample_deviations() -> None:
    """Smallest, largest and mean of three seeds give the third, hence the deviation: with ddof = 1, not 0."""
    for budget, (low, high) in {0.1: (3.1, 28.5), 0.3: (13.1, 66.0), 0.5: (29.3, 85.0)}.items():
        mean, deviation = value("mask-free", "lats:mask-free", budget, "retention")
        seeds = [low, high, 3 * mean - low - high]
        assert np.std(seeds, ddof=1) == pytest.approx(deviation, abs=0.15)
        assert abs(np.std(seeds) - deviation) > 2


def test_no_selector_of_the_paper_is_above_the_ceiling() -> None:
    ceiling = {0.1: 29.3, 0.3: 69.0, 0.5: 87.1}  # measured on its 155 masks
    rows = paper.table("robustness").query("metric == 'retention'")
    assert (rows["paper"] <= rows["budget"].map(ceiling)).all()


def test_every_number_stands_in_the_text_of_the_paper(shared: Path) -> None:
    text = (shared / "paper" / "paper.tex").read_text()
    lines = [re.sub(r"\\textbf\{([^}]*)\}", r"\1", line) for line in text.splitlines() if line.rstrip().endswith(r"\\")]
    rows = [re.sub(r"\s+", " ", line) for line in lines]
    for study in ("main", "kvasir"):
        for method, numbers in paper.table(study).query("metric == 'accuracy'").groupby("method"):
            assert f"{PAPER_NAMES[method]} & {' & '.join(map(str, numbers['paper']))} \\\\" in rows
    for study, digits in (("robustness", 2), ("mask-free", 1)):
        numbers = paper.table(study)
        for row in numbers[~numbers["metric"].isin(["enrichment", *(["retention"] if study == "robustness" else [])])].itertuples():
            start = f"{row.budget} & {PAPER_NAMES[row.method]} " if study == "robustness" else f"{row.budget} &"
            spread = f"{row.paper:.{digits}f}{{\\pm}}{row.paper_sd:.{digits}f}"
            assert any(line.startswith(start) and spread in line for line in rows), row


def test_the_tables_are_tidy_and_have_our_names() -> None:
    for study in paper.STUDIES:
        table = paper.table(study)
        assert list(table.columns) == ["method", "budget", "metric", "paper", "paper_sd"]
        assert not table.duplicated(["method", "budget", "metric"]).any()
        assert table["paper"].notna().all()
    assert set(paper.table("main")["method"]) == set(PAPER_METHODS)
    assert len(paper.table("main").query("metric == 'accuracy'")) == 70


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
