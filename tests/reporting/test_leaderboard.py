"""The leaderboard: methods of several runs in one order, and runs that are not comparable rejected with every reason."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from medtokenbudget.cli import main
from medtokenbudget.errors import MismatchError, RequestError, UnknownNameError
from medtokenbudget.experiments.results import read_results
from medtokenbudget.reporting.leaderboard import leaderboard
from tests.reporting.fake_run import edit_run, fake_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = [fake_run(tmp_path / name, studies=("robustness",), images=False) for name in ("mine", "theirs")]
    for run in made:
        edit_run(run, hashes={"manifest": "a", "split": "b", "store": run.name}, backbone={"name": run.name})
    return made


def test_methods_are_ordered_by_their_mean_over_seeds_and_references_have_no_rank(runs: list[Path], tmp_path: Path) -> None:
    board = leaderboard(runs, "accuracy").data
    results = read_results(runs[0] / "results.csv")
    mine = results[(results["method"] == "random") & (results["budget"] == 0.3)]
    row = board[(board["run"] == "mine") & (board["method"] == "random")].iloc[0]
    assert row["accuracy"] == pytest.approx(mine["accuracy"].mean())
    assert row["accuracy_std"] == pytest.approx(mine["accuracy"].std())
    assert row["seeds"] == 2
    assert board["accuracy"].is_monotonic_decreasing
    assert board[board["method"] == "oracle"]["rank"].isna().all()
    ranks = board["rank"].dropna().tolist()
    assert ranks == list(range(1, len(ranks) + 1))
    assert set(board["run"]) == {"mine", "theirs"}


def test_the_command_writes_markdown_csv_and_a_page(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leaderboard", *map(str, runs), "--out", str(tmp_path / "board"), "--metric", "retention_of_ceiling"]) == 0
    printed = capsys.readouterr().out
    assert "| Rank | Method | Run |" in printed
    assert (tmp_path / "board" / "leaderboard.md").read_text(encoding="utf-8").strip() == printed.strip()
    assert "theirs" in (tmp_path / "board" / "leaderboard.html").read_text(encoding="utf-8")
    assert len(pd.read_csv(tmp_path / "board" / "leaderboard.csv")) == 14


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hashes": {"manifest": "a", "split": "c"}}, "theirs has another split than mine"),
        ({"hashes": {"manifest": "z", "split": "b"}}, "theirs has another manifest"),
        ({"classes": ["NV", "MEL"]}, "theirs has the classes NV, MEL"),
        ({"config": {"protocol": "paper"}}, "one picks epochs on validation images"),
    ],
)
def test_runs_that_are_not_comparable_are_rejected_with_the_reason(
    runs: list[Path], values: dict[str, object], reason: str
) -> None:
    edit_run(runs[1], **values)
    with pytest.raises(MismatchError, match=f"not comparable: .*{reason}"):
        leaderboard(runs)


def test_what_is_not_in_the_runs_has_a_message(runs: list[Path]) -> None:
    with pytest.raises(RequestError, match=r"No run has results at budget 0\.35"):
        leaderboard(runs, budget=0.35)
    with pytest.raises(UnknownNameError, match="Did you mean 'accuracy'"):
        leaderboard(runs, "acuracy")
    with pytest.raises(RequestError, match="given more than once"):
        leaderboard([runs[0], runs[0]])
