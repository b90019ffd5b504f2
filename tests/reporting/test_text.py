"""How sentences follow the numbers, and how templates escape."""

from __future__ import annotations

import pytest

from medtokenbudget.reporting.intervals import Difference, ReportRun
from medtokenbudget.reporting.text import failures, findings


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
    read_run: ReportRun, monkeypatch: pytest.MonkeyPatch, gap: Difference | None, words: str
) -> None:
    monkeypatch.setattr(ReportRun, "difference", lambda *_: gap)
    assert any(words in sentence for sentence in findings(read_run))


def test_failures_name_the_stratum_that_is_kept_least(read_run: ReportRun) -> None:
    rows = read_run.by_size[read_run.by_size["method"] == "lats:lesion-first"]
    worst = rows.loc[rows["value"].idxmin(), "stratum"]
    assert any(f"“{worst}”" in sentence for sentence in failures(read_run))
