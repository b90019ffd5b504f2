"""The figures: what each one shows, beyond the numbers that `test_page.py` traces."""

from __future__ import annotations

import pytest

from medtokenbudget.model.looks import look
from medtokenbudget.reporting.figures import DRAWN, house_style
from medtokenbudget.reporting.intervals import ReportRun


def legend(run: ReportRun, name: str) -> list[str]:
    with house_style():
        figure = DRAWN[name](run)
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_the_figure_of_the_training_shows_only_losses_that_were_trained_with(read_run: ReportRun) -> None:
    with house_style():
        figure = DRAWN["curriculum"](read_run)
    assert legend(read_run, "curriculum") == ["lesion"]
    assert len(figure.axes) == 1  # the lesion loss alone does not depend on the budget


@pytest.mark.slow
def test_every_point_and_line_has_its_method_in_the_legend(read_run: ReportRun) -> None:
    both = [m for m in read_run.at("retention") if m in read_run.at("accuracy") and m != "no-pruning"]
    assert sorted(legend(read_run, "accuracy-against-retention")) == sorted(look(m).title for m in both)
    values = read_run.at("retention_of_ceiling", 0.3, "center-bias", "off-center")
    ranked = sorted(values, key=lambda m: -values[m])
    assert legend(read_run, "center-bias") == [f"{look(m).title} {100 * values[m]:.1f}" for m in ranked]


def test_the_entry_of_a_method_in_a_legend_has_its_own_color_and_marker(read_run: ReportRun) -> None:
    looks = {look(m).title: look(m) for m in read_run.methods}
    for name in ("accuracy-against-retention", "center-bias", "size-strata"):
        with house_style():
            figure = DRAWN[name](read_run)
        (box,) = figure.legends
        for text, line in zip(box.get_texts(), box.get_lines(), strict=True):
            own = looks[text.get_text().rstrip("0123456789. ")]
            assert (line.get_color(), line.get_marker()) == (own.color, own.marker), text.get_text()
