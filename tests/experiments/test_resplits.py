"""Re-splits: folds that share no group, and variance split into folds and seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest
from medtokenbudget.experiments.execution import Execution
from medtokenbudget.experiments.resplits import components, resplits, stratified_folds
from tests.drawn import Drawn, quick

pytestmark = pytest.mark.slow


def test_variance_components_worked_by_hand() -> None:
    # Seeds inside a fold: variance 2 and 2. Fold means 2 and 6: variance 8, of which 2 / 2 comes from the seeds.
    found = components(np.array([[1.0, 3.0], [5.0, 7.0]]))
    assert (found.mean, found.between_folds**2, found.between_seeds**2) == pytest.approx((4.0, 7.0, 2.0))
    assert found.fold_share == pytest.approx(7 / 9)
    assert components(np.array([[1.0, 9.0], [9.0, 1.0]])).between_folds == 0
    assert np.isnan(components(np.array([[1.0], [2.0]])).between_seeds)


def test_variance_components_are_recovered_from_many_draws() -> None:
    draw = np.random.default_rng(0)
    values = 5 + 3 * draw.standard_normal((4000, 1)) + 2 * draw.standard_normal((4000, 3))
    found = components(values)
    assert found.between_folds == pytest.approx(3, rel=0.05)
    assert found.between_seeds == pytest.approx(2, rel=0.05)


def test_every_image_is_validated_once_and_no_group_is_in_two_parts(drawn: Drawn, tmp_path: Path) -> None:
    table = resplits(
        drawn.manifest_path,
        drawn.store_path,
        tmp_path,
        ("center", "lats"),
        folds=2,
        seeds=(42, 43),
        budgets=(0.3,),
        config=quick("paper", epochs=1, head_epochs=1),
        execution=Execution(jobs=1),
    )
    manifests = [Manifest.read(tmp_path / f"fold-{fold}" / "manifest.parquet") for fold in range(2)]
    validated = [name for manifest in manifests for name in manifest.part("val").ids]
    assert sorted(validated) == sorted(drawn.manifest.ids)
    for manifest in manifests:
        assert manifest.split_rule.startswith("stratified")
        groups = [set(manifest.part(part).groups) for part in ("train", "val")]
        assert not groups[0] & groups[1]
    results = pd.read_csv(tmp_path / "results.csv")
    assert len(results) == 8
    row = table[(table["method"] == "center") & (table["metric"] == "accuracy")].iloc[0]
    cells = results[results["method"] == "center"].pivot(index="fold", columns="seed", values="accuracy").to_numpy()
    assert row["mean"] == pytest.approx(cells.mean())
    assert row["between_seeds"] ** 2 == pytest.approx(cells.var(axis=1, ddof=1).mean())
    assert (row["folds"], row["seeds"]) == (2, 2)
    retention = table[(table["method"] == "center") & (table["metric"] == "retention")].iloc[0]
    assert retention["between_seeds"] == 0


def test_every_fold_has_about_the_same_share_of_each_class(drawn: Drawn) -> None:
    labels = drawn.manifest.label_index
    folds = stratified_folds(drawn.manifest, 3)
    for kind in np.unique(labels):
        held = [int((fold.part("val").label_index == kind).sum()) for fold in folds]
        largest = max(pd.Series(folds[0].groups).value_counts())
        assert sum(held) == (labels == kind).sum()
        assert max(held) - min(held) <= 2 * largest, (kind, held)
    assert len({fold.hash for fold in folds}) == 3


def test_the_study_runs_alone(drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path / "out")]
    assert main(["reproduce", *paths, "--study", "resplits", "main"]) == 2
    assert "runs alone" in capsys.readouterr().err


def test_the_command_takes_methods_and_seeds(drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(drawn.manifest_path), "--store", str(drawn.store_path), "--jobs", "1", "--head-epochs", "1"]
    chosen = ["--methods", "center", "random", "--seeds", "7", "--folds", "2"]
    assert main(["reproduce", *paths, "--out", str(tmp_path / "out"), "--study", "resplits", *chosen]) == 0
    results = pd.read_csv(tmp_path / "out" / "results.csv")
    assert set(results["method"]) == {"center", "random"}
    assert set(results["seed"]) == {7}
    assert set(results["fold"]) == {0, 1}
    assert main(["reproduce", *paths, "--out", str(tmp_path / "other"), "--study", "main", "--seeds", "7"]) == 2
    assert "--seeds is an option of the study resplits" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_fold_whose_training_fails_fails_the_command(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr("medtokenbudget.routing.selectors.center.Center.score", fails)
    paths = [str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path / "out")]
    options = ["--methods", "center", "random", "--seeds", "7", "--folds", "2", "--jobs", "1", "--head-epochs", "1"]
    assert main(["reproduce", *paths, "--study", "resplits", *options]) == 1
    assert "1 of 2 trainings failed: center (seed 7)" in capsys.readouterr().err
