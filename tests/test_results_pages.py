"""The results pages are what the script makes of the CSV files next to them, and their numbers follow from the rows by hand."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"


def tool(name: str) -> ModuleType:
    """A script of docs/tools, which import one another by their bare names."""
    folder = str(REPOSITORY / "docs" / "tools")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return tool("results_pages")


def test_the_pages_of_finished_studies_show_the_numbers_of_their_csv() -> None:
    row = rows("early-routing", table="validation", way="scout-0.3", view="as-is")[0]
    shown = cell("early-routing", "scout, 76 from block 0", "validation: macro F1")
    assert shown.startswith(f"{float(row['macro_f1']):.1f} ({float(row['low_macro_f1']):.1f} to ")
    kept = rows("scorer", backbone="embedded", method="center", view="as-is", budget="0.3")
    value = 100 * mean(float(row["retention_of_ceiling"]) for row in kept)
    assert cell("scorer", "Center", "0.3").startswith(f"{value:.1f}")


def test_the_page_of_every_selector_is_what_its_script_makes_of_its_csv() -> None:
    assert (RESULTS / "zoo.md").read_text(encoding="utf-8") == tool("zoo_page").page(), "run python docs/tools/zoo_page.py"
    row = rows("zoo", backbone="embedded", method="center", view="as-is", budget="0.3")[0]
    assert cell("zoo", "Center", "kept") == f"{100 * float(row['retention_of_ceiling']):.1f}"
    half = 50 * (float(row["accuracy_high"]) - float(row["accuracy_low"]))
    assert cell("zoo", "Center", "accuracy") == f"{100 * float(row['accuracy']):.1f}±{half:.1f}"
    heads = [rows("zoo-heads", method="tome+abmil", view=view, budget="0.3")[0] for view in ("as-is", "off-center")]
    assert cell("zoo", "ToMe", "abmil") == " / ".join(f"{100 * float(row['balanced_accuracy']):.1f}" for row in heads)
    assert "[" not in re.sub(r"!?\[[^|\]]*\]\(", "", (RESULTS / "zoo.md").read_text(encoding="utf-8")), "a number is not filled in"


def rows(name: str, **wanted: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
        matching = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]
    assert matching, wanted
    return matching


def cell(page: str, row: str, column: str) -> str:
    """A cell of the first table of a page that has this row and column."""
    for block in (RESULTS / f"{page}.md").read_text(encoding="utf-8").split("\n\n"):
        lines = [[part.strip() for part in line.strip("| ").split("|")] for line in block.splitlines() if line.startswith("|")]
        if lines and column in lines[0]:
            for line in lines[2:]:
                if line[0] == row:
                    return line[lines[0].index(column)]
    raise AssertionError(f"{page}.md has no cell ({row}, {column})")


def test_every_page_is_what_the_script_makes_of_its_csv(script: ModuleType) -> None:
    for name, write in script.PAGES.items():
        assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == write(), f"run python docs/tools/results_pages.py: {name}"


def test_a_changed_csv_changes_the_page(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8").replace(",0.97", ",0.57"), encoding="utf-8")
    before = script.center_bias_page()
    monkeypatch.setattr(tool("results_tables"), "RESULTS", tmp_path)
    assert script.center_bias_page() != before


def test_the_headline_of_the_center_bias_page_is_the_mean_over_three_seeds() -> None:
    for view, column in (("as-is", "share of the ceiling, as-is"), ("off-center", "share of the ceiling, off-center")):
        for method, name in (("lats:lesion-first", "LATS lesion-first"), ("center", "Center")):
            seeds = rows("center-bias", method=method, view=view, budget="0.3")
            assert len(seeds) == 3
            value = 100 * mean(float(row["retention_of_ceiling"]) for row in seeds)
            assert cell("center-bias", name, column) == f"{value:.1f}"


def test_the_paper_stands_beside_ours_as_printed() -> None:
    assert cell("index", "accuracy, 0.3", "paper: LATS") == "80.4"
    assert cell("index", "retention, 0.3", "paper: LATS") == "67.4"
    assert cell("index", "retention, 0.3", "paper: Random") == "29.7"
    ours = 100 * mean(float(row["retention"]) for row in rows("robustness", method="lats", budget="0.3"))
    assert cell("index", "retention, 0.3", "LATS") == f"{ours:.1f}"


def test_every_page_of_results_says_where_it_comes_from() -> None:
    pages = [page for page in RESULTS.glob("*.md") if page.stem != "index"]
    assert len(pages) >= 7
    for page in pages:
        text = page.read_text(encoding="utf-8").lower()
        for word in ("seed", "backbone", "commit"):
            assert word in text, f"{page.name} does not say its {word}"
        assert re.search(r"\]\(\w[\w-]*\.csv\)", text), f"{page.name} has no CSV to download"
        for target in re.findall(r"\]\(([\w/-]+\.(?:csv|svg|png))\)", text):
            assert (RESULTS / target).exists(), f"{page.name}: {target}"


def test_the_table_of_the_readme_is_made_from_the_same_csv() -> None:
    assert tool("results_pages").readme_table() in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_saving_in_the_readme_is_that_of_the_measured_guarantee() -> None:
    row = rows("guarantee", scores="router", retention="0.95", coverage="")[0]
    text = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    tokens, fixed, n = f"{float(row['tokens']):.0f}", row["fixed"], f"{int(row['images']):,}"
    claim = f"takes {tokens} tokens on average where one budget for all images takes {fixed} (n = {n})"
    assert claim in text


def test_the_speeds_in_the_readme_are_the_measured_ones() -> None:
    speed = {row["way"]: row["ratio"] for row in rows("early-routing", table="speed", shape="ViT-S/14", batch="16", threads="1")}
    smaller = speed[tool("results_tables").smaller_image(speed)]
    text = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    assert f"is {speed['scout']} times as fast as the dense pass (ToMe {speed['tome']}, a smaller image {smaller})" in text
