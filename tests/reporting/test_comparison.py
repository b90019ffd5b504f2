"""Several runs in one report: names, pairing by image, notes on what cannot be compared, and the numbers as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from medtokenbudget.api import report
from medtokenbudget.cli import main
from medtokenbudget.errors import RequestError
from medtokenbudget.reporting.comparison import Comparison, unique_names
from medtokenbudget.runs.run import read_predictions, write_predictions
from tests.reporting.fake_run import edit_run, fake_run

pytestmark = pytest.mark.slow

SMALL = ("no-pruning", "random", "lats", "lats:lesion-first", "center", "oracle")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("first") / "isic", seeds=(42,), studies=("main",), images=False, methods=SMALL)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images with another main method and other seeds."""
    folder = tmp_path_factory.mktemp("second") / "isic"
    return fake_run(folder, seeds=(43,), studies=("main",), images=False, methods=("random", "lats", "center"), learned=("lats",))


def changed(run: Path, out: Path, change: Callable[[pd.DataFrame, tuple[str, ...]], pd.DataFrame], **info: object) -> Path:
    """A copy of a run with other predictions, and other entries in its run.json."""
    shutil.copytree(run, out)
    frame, classes = read_predictions(out / "predictions.parquet")
    frame = change(frame, classes)
    write_predictions(out / "predictions.parquet", frame, frame.attrs.get("classes", classes))
    return edit_run(out, **info)


def test_runs_are_named_by_their_directories_with_parents_where_needed(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a/isic", "b/isic", "demo")]
    assert unique_names(names) == ["a/isic", "b/isic", "demo"]
    with pytest.raises(RequestError, match="more than once"):
        unique_names([tmp_path / "a", tmp_path / "b" / ".." / "a"])


def test_every_table_has_a_row_per_run_with_the_numbers_of_its_results(first: Path, second: Path, tmp_path: Path) -> None:
    page = report(first, second, out=tmp_path / "both")
    table = pd.read_csv(tmp_path / "both" / "tables" / "main.csv")
    for folder in (first, second):
        name = f"{folder.parent.name}/isic"
        results = pd.read_csv(folder / "results.csv").set_index(["method", "budget"])
        rows = table[(table["run"] == name) & (table["metric"] == "accuracy") & (table["budget"] == 0.3)]
        assert set(rows["method"]) == set(results.index.get_level_values(0))
        for row in rows.itertuples():
            assert row.value == pytest.approx(results.loc[(row.method, 0.3), "accuracy"], abs=1e-5)
    text = page.read_text(encoding="utf-8")
    assert "Comparison of 2 runs" in text
    assert "no seed in common" in text
    for name in ("retention-sweep", "accuracy-sweep", "macro-f1-sweep", "further-measures", "runs"):
        assert set(pd.read_csv(tmp_path / "both" / "tables" / f"{name}.csv")["run"]) == set(table["run"]), name


def test_differences_are_paired_by_image_and_are_those_of_the_results(first: Path, second: Path) -> None:
    comparison = Comparison.read([first, second])
    pairs = comparison.tests
    row = pairs[(pairs["method"] == "lats") & (pairs["minus_method"] == "lats") & (pairs["metric"] == "accuracy")]
    row = row[np.isclose(row["budget"], 0.3)].iloc[0]
    ours, theirs = (
        pd.read_csv(folder / "results.csv").set_index(["method", "budget"]).loc[("lats", 0.3), "accuracy"]
        for folder in (second, first)
    )
    assert row["difference"] == pytest.approx(ours - theirs)
    assert row["n"] == 24
    assert row["low"] <= row["difference"] <= row["high"]
    mains = pairs[(pairs["method"] == "lats") & (pairs["minus_method"] == "lats:lesion-first")]
    assert set(mains["metric"]) == {"accuracy", "macro_f1", "balanced_accuracy", "retention"}


def test_a_run_compared_with_itself_under_another_class_order_does_not_differ(first: Path, tmp_path: Path) -> None:
    def reverse(frame: pd.DataFrame, classes: tuple[str, ...]) -> pd.DataFrame:
        frame = frame.assign(**(len(classes) - 1 - frame[["label", "predicted"]]))
        frame.attrs["classes"] = tuple(reversed(classes))
        return frame

    comparison = Comparison.read([first, changed(first, tmp_path / "reordered", reverse, hashes={"split": "9"})])
    tests = comparison.tests
    assert len(tests) > 0
    assert (tests[["difference", "low", "high"]].abs() < 1e-12).all().all()
    assert any("different splits" in note for note in comparison.notes)


def test_runs_on_other_images_are_shown_side_by_side_with_a_note(first: Path, tmp_path: Path) -> None:
    other = changed(first, tmp_path / "elsewhere", lambda frame, _: frame.assign(image_id="x" + frame["image_id"]))
    text = report(first, other, out=tmp_path / "out").read_text(encoding="utf-8")
    assert "share no validation images" in text
    assert "Are the differences reliable?" not in text


def test_equal_ids_with_other_labels_are_other_images(first: Path, tmp_path: Path) -> None:
    other = changed(first, tmp_path / "relabeled", lambda frame, classes: frame.assign(label=(frame["label"] + 1) % len(classes)))
    comparison = Comparison.read([first, other])
    assert comparison.tests.empty
    assert any("with different labels" in note for note in comparison.notes)


def test_the_command_prints_json_and_nothing_else(
    first: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(first), str(second), "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in printed["runs"]] == [f"{first.parent.name}/isic", f"{second.parent.name}/isic"]
    assert printed["runs"][1]["main"] == "lats"
    value = pd.read_csv(second / "results.csv").set_index(["method", "budget"]).loc[("center", 0.3), "retention"]
    assert printed["runs"][1]["methods"]["center"]["retention"]["value"] == pytest.approx(value)
    assert {"run", "method", "minus_run", "difference", "low", "high", "p_holm", "n"} <= set(printed["comparisons"][0])
    assert printed["comparisons"][0]["n"] == 24
    assert Path(printed["page"]).is_file()


def test_several_runs_need_an_output_directory(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(first), str(second)]) == 2
    assert "choose" in capsys.readouterr().err


def test_the_leaderboard_ranks_the_main_methods_and_the_controls_on_shared_images(
    first: Path, second: Path, tmp_path: Path
) -> None:
    report(first, second, out=tmp_path / "both")
    table = pd.read_csv(tmp_path / "both" / "tables" / "leaderboard.csv")
    board = table[(table["metric"] == "retention_of_ceiling") & (table["view"] == "as-is")].set_index("method")
    assert set(zip(board.index, board["run"])) == {
        *((name, "first0/isic") for name in ("lats:lesion-first", "center", "random", "oracle")),
        ("lats", "second0/isic"),
    }
    for name, folder in (("center", first), ("lats", second)):
        results = pd.read_csv(folder / "results.csv").set_index(["method", "budget"])
        assert board.loc[name, "value"] == pytest.approx(results.loc[(name, 0.3), "retention_of_ceiling"], abs=1e-5)
    assert board["value"].is_monotonic_decreasing
    assert (board["first"] <= board["last"]).all()
    assert board.loc["oracle", ["first", "last", "tie"]].tolist()[0] == 1
    assert board.loc["random", "first"] == len(board)  # clearly below every other one
    assert board["tie"].tolist() == sorted(board["tie"])
    text = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "ranked at budget 0.3" in text
