"""The progress of a sweep: where the running units are, and an estimate that never counts units of different length alike."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from medtokenbudget.config import preset
from medtokenbudget.experiments.execution import Execution
from medtokenbudget.experiments.methods import Method
from medtokenbudget.experiments.sweep import sweep
from medtokenbudget.experiments.units import Plan, Unit
from medtokenbudget.experiments.watching import FILE, Pace, Watch, kind_of, read_pace, reporter, time_left
from tests.drawn import Drawn, quick

LONG, SHORT = ("lats",), ("head",)


def test_units_of_one_kind_are_expected_to_take_as_long_as_those_that_finished() -> None:
    left, unknown = time_left([LONG, LONG, SHORT], [], {LONG: [100.0, 200.0], SHORT: [2.0]}, jobs=1)
    assert (left, unknown) == (150.0 + 150.0 + 2.0, 0)


def test_many_short_units_say_nothing_about_a_long_one() -> None:
    left, unknown = time_left([LONG], [], {SHORT: [1.0] * 12}, jobs=2)
    assert (left, unknown) == (0.0, 1)


def test_a_running_unit_is_extrapolated_from_its_epochs_and_stands_for_its_kind() -> None:
    pace = Pace(share=0.25, seconds=30.0, text="")
    left, unknown = time_left([LONG], [(LONG, pace)], {}, jobs=1)
    assert (left, unknown) == (90.0 + 120.0, 0)


def test_with_two_jobs_nothing_ends_before_its_longest_unit() -> None:
    pace = Pace(share=0.5, seconds=100.0, text="")
    assert time_left([SHORT], [(LONG, pace)], {SHORT: [2.0]}, jobs=2) == (100.0, 0)


def test_the_head_of_the_second_stage_counts_for_little(tmp_path: Path) -> None:
    state = {"stage": "selector", "done": 4, "total": 8, "started": 100.0, "stages": ["selector", "head"]}
    (tmp_path / FILE).write_text(json.dumps(state))
    pace = read_pace(tmp_path, "lats", now=150.0)
    assert pace is not None
    assert (pace.share, pace.seconds, pace.text) == (pytest.approx(0.5 / 1.1), 50.0, "lats epoch 4/8")
    (tmp_path / FILE).write_text(json.dumps({**state, "stage": "head", "done": 30, "total": 30}))
    pace = read_pace(tmp_path, "lats", now=150.0)
    assert pace is not None
    assert (pace.share, pace.text) == (pytest.approx(1.0), "lats head epoch 30/30")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stage": "selector"}'])
def test_a_progress_file_that_is_being_written_is_no_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_pace(tmp_path, "lats", 0.0) is None


def test_recipes_and_selectors_that_draw_are_kinds_of_their_own() -> None:
    base = preset("paper")
    names = ("lats", "lats:lesion-first", "center", "tome", "random", "lats:no-norm", "lats+abmil", "center+abmil")
    kinds = [kind_of(Unit(method, 42), method.config(base)) for method in map(Method.parse, names)]
    assert kinds[2] == kinds[3]
    assert len(set(kinds)) == 7


def test_a_unit_whose_selector_is_there_already_counts_the_epochs_of_its_head_alone(tmp_path: Path) -> None:
    plan = Plan(tmp_path, tmp_path, tmp_path, preset("lesion-first"), "drawn")
    unit = Unit(Method.parse("lats+abmil:lesion-first"), 42)
    report = reporter(plan, unit)
    shares = []
    for done in (1, 2):
        report("head", done, 4)
        pace = read_pace(plan.folder(unit), "lats", now=time.time())
        assert pace is not None
        shares.append(pace.share)
    assert shares == [0.25, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_shows_the_epochs_inside_its_units_and_leaves_no_progress_file(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    shown: list[str] = []
    real = Watch.refresh

    def look(self: Watch) -> None:
        real(self)
        shown.append(str(self.bar.postfix))

    monkeypatch.setattr(Watch, "refresh", look)
    methods, config = ("lats", "center"), quick("paper", "lats", "center", epochs=3, patience=9)
    sweep(drawn.manifest, drawn.store, tmp_path, methods, config=config, execution=Execution(jobs=jobs))
    if jobs == 1:
        assert any("lats (seed 42) epoch 1/3, at least" in text for text in shown)
        assert any("center (seed 42) epoch 1/2" in text for text in shown)
    assert shown
    assert not list(tmp_path.rglob(f"*{FILE}*"))
