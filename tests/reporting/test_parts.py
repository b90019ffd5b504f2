"""The small parts of the report: how numbers are written, how sentences follow the numbers, what methods look like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from medtokenbudget.config import DEFAULT_METHODS
from medtokenbudget.reporting.details import curriculum
from medtokenbudget.reporting.evidence import MOST_DRAWN
from medtokenbudget.reporting.intervals import Difference, Intervals
from medtokenbudget.reporting.labels import end_labels, point_labels
from medtokenbudget.reporting.looks import LOOKS, look, ordered
from medtokenbudget.reporting.numbers import budget_text, percent, points, probability, with_deviation, with_interval
from medtokenbudget.reporting.story import failures, headline
from medtokenbudget.reporting.style import house_style, new_figure
from medtokenbudget.reporting.table import Table, latex_text


def test_not_measured_is_a_dash_and_zero_is_zero() -> None:
    assert percent(np.nan) == percent(None) == "—"
    assert percent(0.0) == "0.0"
    assert points(-0.0123) == "−1.2"
    assert points(0.0) == points(-0.0001) == "0.0"
    assert with_interval(0.674, 0.65, 0.698) == "67.4 [65.0, 69.8]"
    assert with_deviation(0.8038, np.nan) == "80.38"
    assert with_deviation(0.8038, 0.0018) == "80.38 ± 0.18"
    assert probability(0.0001) == "< 0.001"
    assert [budget_text(value) for value in (0.3, 1.0, 0.25)] == ["0.3", "1.0", "0.25"]


def test_latex_commands_in_names_are_harmless() -> None:
    assert latex_text("a_b & 5 % {x} −±—") == r"a\_b \& 5 \% \{x\} $-$$\pm$---"


def test_a_table_says_the_same_in_all_its_forms() -> None:
    table = Table(
        "t", "Title", ["Method", "Acc."], [["a<b", "1.0 [0.5, 1.5]"], ["c", "—"]], pd.DataFrame(), bold=frozenset({(0, 1)})
    )
    assert "| a&lt;b | **1.0 [0.5, 1.5]** |" in table.markdown()
    assert r"a\textless{}b & \textbf{1.0 [0.5, 1.5]} \\" in table.latex()
    assert "<td><b>1.0</b> <small>[0.5, 1.5]</small></td>" in table.html()
    assert '<th scope="row">a&lt;b</th>' in table.html()
    assert "scroll inside this box" not in table.html()
    assert 'Download: <a href="tables/t.csv">CSV</a>' in table.html()


def test_a_table_that_is_cut_by_its_box_says_how_many_rows_it_has() -> None:
    table = Table("t", "Title", ["Method"], [["lats"]] * 40, pd.DataFrame())
    assert "40 rows; scroll inside this box</p></div>" in table.html()


def test_methods_have_distinct_markers_and_colors() -> None:
    default = [look(method) for method in DEFAULT_METHODS]
    assert len({style.color for style in default}) == len({style.marker for style in default}) == len(default)
    shown = [*LOOKS.values(), look("lats:lesion-first")]
    assert len({(style.color, style.marker) for style in shown}) == len(shown)
    assert len({style.name for style in shown}) == len(shown)


def test_a_method_is_named_by_its_selector_head_and_variant() -> None:
    assert look("lats").name == "LATS (paper)"
    assert look("lats:lesion-first").name == "LATS lesion-first"
    assert look("lats:no-norm").name == "LATS − norm"
    assert look("lats:lesion-first-raster").name == "lesion-first with 1D contrast"
    assert look("center:matched").name == "Center matched"
    assert look("center+linear").name == "Center + linear"
    assert look("lats:raster").name == "lats:raster"
    assert look("somebody-elses") == look("somebody-elses")


def test_learned_methods_come_first_and_controls_last() -> None:
    methods = ["oracle", "new", "center", "lats", "random", "lats:lesion-first"]
    assert ordered(methods, ["lats:lesion-first", "lats"]) == ["lats:lesion-first", "lats", "random", "new", "center", "oracle"]
    assert ordered(methods, ["new"])[0] == "new"


def test_a_figure_of_many_methods_shows_the_telling_ones(intervals: Intervals) -> None:
    few = intervals.evidence
    assert few.drawn(few.methods) == few.methods
    rows = few.main[few.main["method"] == "norm"]
    further = [
        rows.assign(method=name, retention_of_ceiling=kept, macro_f1=score)
        for name, kept, score in [
            *((f"low-{i}", 0.01, 0.01) for i in range(20)),
            ("keeps", 1.0, 0.0),
            ("classifies", 0.0, 1.0),
            ("norm+abmil", 1.0, 1.0),
            ("norm:keys", 1.0, 1.0),
        ]
    ]
    many = replace(few, results=pd.concat([few.results, *further], ignore_index=True))
    shown = many.drawn(many.methods)
    assert len(shown) == MOST_DRAWN
    assert {*many.emphasized, "oracle", "no-pruning", "keeps", "classifies"} <= set(shown)
    assert not {"norm+abmil", "norm:keys"} & set(shown)
    assert shown == [m for m in many.methods if m in shown], "in the order of the tables"


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


def test_names_beside_points_cover_neither_points_nor_each_other() -> None:
    with house_style():
        figure, axes = new_figure()
        axes.set(xlim=(0, 1), ylim=(0, 1))
        points = {"lats": (0.5, 0.5), "center": (0.51, 0.5), "random": (0.5, 0.51), "oracle": (0.99, 0.99)}
        point_labels(axes, points)
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts]
        dots = [axes.transData.transform(point) for point in points.values()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(box.contains(*dot) for box in boxes for dot in dots)
    assert all(axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 for box in boxes)


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (Difference(0.02, 0.01, 0.03, 0.001, 24), "LATS lesion-first is better than simply keeping the image center"),
        (Difference(0.001, -0.01, 0.012, 0.8, 24), "LATS lesion-first is not clearly better than simply keeping the image center"),
        (Difference(0.01, 0.001, 0.02, 0.12, 24), "LATS lesion-first is not clearly better than simply keeping the image center"),
        (Difference(-0.02, -0.03, -0.01, 0.001, 24), "LATS lesion-first is worse than simply keeping the image center"),
        (None, "did not measure whether LATS lesion-first is better"),
    ],
)
def test_the_sentence_about_the_center_follows_the_interval(
    intervals: Intervals, monkeypatch: pytest.MonkeyPatch, gap: Difference | None, words: str
) -> None:
    monkeypatch.setattr(intervals, "difference", lambda *_: gap)
    assert any(words in sentence for sentence in headline(intervals.evidence, intervals))


def test_the_figure_of_the_training_shows_only_losses_that_were_trained_with(intervals: Intervals) -> None:
    with house_style():
        figure = curriculum(intervals.evidence, intervals)
    assert figure is not None
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == ["lesion"]
    assert len(figure.axes) == 1  # the lesion loss alone does not depend on the budget


def test_failures_name_the_stratum_that_is_kept_least(intervals: Intervals) -> None:
    rows = intervals.by_size[intervals.by_size["method"] == "lats:lesion-first"]
    worst = rows.loc[rows["value"].idxmin(), "stratum"]
    assert any(f"“{worst}”" in sentence for sentence in failures(intervals.evidence, intervals))
