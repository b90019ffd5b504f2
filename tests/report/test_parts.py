"""The small parts of the report: how numbers are written, how sentences follow the numbers, how methods look."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from medtokenbudget.report.details import end_labels
from medtokenbudget.report.intervals import Difference, Intervals
from medtokenbudget.report.story import failures, headline
from medtokenbudget.report.style import LOOKS, house_style, look, new_figure, ordered
from medtokenbudget.report.table import Table, latex_text, percent, points, probability, with_deviation, with_interval


def test_not_measured_is_a_dash_and_zero_is_zero() -> None:
    assert percent(np.nan) == percent(None) == "—"
    assert percent(0.0) == "0.0"
    assert points(-0.0123) == "−1.2"
    assert points(0.0) == points(-0.0001) == "0.0"
    assert with_interval(0.674, 0.65, 0.698) == "67.4 [65.0, 69.8]"
    assert with_deviation(0.8038, np.nan) == "80.38"
    assert with_deviation(0.8038, 0.0018) == "80.38 ± 0.18"
    assert probability(0.0001) == "< 0.001"


def test_latex_commands_in_names_are_harmless() -> None:
    assert latex_text("a_b & 5 % {x} −±—") == r"a\_b \& 5 \% \{x\} $-$$\pm$---"


def test_a_table_says_the_same_in_all_its_forms() -> None:
    table = Table(
        "t", "Title", ["Method", "Acc."], [["a<b", "1.0 [0.5, 1.5]"], ["c", "—"]], pd.DataFrame(), bold=frozenset({(0, 1)})
    )
    assert "| a<b | **1.0 [0.5, 1.5]** |" in table.markdown()
    assert r"a\textless{}b & \textbf{1.0 [0.5, 1.5]} \\" in table.latex()
    assert "<td><b>1.0</b> <small>[0.5, 1.5]</small></td>" in table.html()
    assert '<th scope="row">a&lt;b</th>' in table.html()
    assert "scroll in this box" not in table.html()


def test_a_table_that_is_cut_by_its_box_says_how_many_rows_it_has() -> None:
    table = Table("t", "Title", ["Method"], [["lats"]] * 40, pd.DataFrame())
    assert "40 rows: scroll in this box for the rest</p></div>" in table.html()


def test_methods_have_distinct_markers_and_colours_and_a_fixed_order() -> None:
    pairs = [(style.color, style.marker) for style in LOOKS.values()]
    assert len(set(pairs)) == len({color for color, _ in pairs}) == len({marker for _, marker in pairs}) == len(LOOKS)
    assert look("lats:no-norm").name == "LATS − norm"
    assert look("lats:lesion-first-raster").name == "lesion-first with 1D contrast"
    assert look("lats:raster").name == "lats:raster"
    assert look("somebody-elses") == look("somebody-elses")
    assert ordered(["oracle", "new", "center", "lats:paper", "random", "lats"]) == [
        "lats",
        "lats:paper",
        "random",
        "new",
        "center",
        "oracle",
    ]


def test_labels_at_the_ends_of_lines_do_not_cover_each_other() -> None:
    with house_style():
        figure, axes = new_figure()
        axes.set_ylim(0, 1)
        end_labels(axes, {"lats": 0.99, "center": 0.985, "oracle": 1.0, "random": 0.3}, 1.0)
        heights = sorted(text.get_position()[1] for text in axes.texts)
    assert np.diff(heights).min() >= 0.062 - 1e-9
    assert heights[0] == pytest.approx(0.3)
    assert heights[-1] <= 1
    figure.clear()


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (Difference(0.02, 0.01, 0.03, 0.001, 24), "LATS is better than keeping the center"),
        (Difference(0.001, -0.01, 0.012, 0.8, 24), "LATS is not clearly better than keeping the center"),
        (Difference(-0.02, -0.03, -0.01, 0.001, 24), "LATS is worse than keeping the center"),
        (None, "was not measured in this run"),
    ],
)
def test_the_sentence_about_the_center_follows_the_interval(
    intervals: Intervals, monkeypatch: pytest.MonkeyPatch, gap: Difference | None, words: str
) -> None:
    monkeypatch.setattr(intervals, "difference", lambda *_: gap)
    assert any(words in sentence for sentence in headline(intervals.evidence, intervals))


def test_failures_name_the_stratum_that_is_kept_least(intervals: Intervals) -> None:
    rows = intervals.by_size[intervals.by_size["method"] == "lats"]
    worst = rows.loc[rows["value"].idxmin(), "stratum"]
    assert any(f"“{worst}”" in sentence for sentence in failures(intervals.evidence, intervals))
