"""The results pages show what reports measured: tables come from CSV files, and the text repeats only their numbers."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from medtokenbudget.model.looks import look
from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"
PAGES = {"index": 900, "zoo": 800, "early-routing": 600, "center-bias": 400}
"""Pages and the most words of their text, without tables."""
TABLE = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(REPOSITORY / "docs" / "tools"))
    try:
        return importlib.import_module("results")
    finally:
        sys.path.pop(0)


def rows(name: str, **wanted: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
        matching = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]
    assert matching, wanted
    return matching


def table(page: Path, name: str) -> list[list[str]]:
    found = dict(TABLE.findall(page.read_text(encoding="utf-8")))[name]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]


def prose(page: Path) -> str:
    """The text of a page without its tables, code and addresses of links."""
    text = TABLE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", text, flags=re.DOTALL)


def test_every_table_is_what_the_script_makes_of_the_csv_files(script: ModuleType) -> None:
    assert {page.name for page in script.PAGES} == {"README.md", "wrap.md", *(f"{name}.md" for name in PAGES)}
    for page in script.PAGES:
        text = page.read_text(encoding="utf-8")
        assert TABLE.search(text), page
        assert script.filled(text) == text, f"run python docs/tools/results.py: {page.name}"


def test_a_changed_csv_changes_the_table(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8").replace(",0.9", ",0.5"), encoding="utf-8")
    before = {name: make() for name, make in script.TABLES.items() if name in ("protocol", "splits", "center-bias", "zoo")}
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert all(script.TABLES[name]() != text for name, text in before.items())


def test_the_readme_quotes_the_table_of_the_results_page() -> None:
    assert table(REPOSITORY / "README.md", "protocol") == table(RESULTS / "index.md", "protocol")


def test_the_numbers_of_the_table_are_those_of_the_report_and_of_the_paper() -> None:
    shown = {line[0].strip("*"): line for line in table(RESULTS / "index.md", "protocol")}
    for title, method in (("LATS lesion-first", "lats:lesion-first"), ("Center", "center"), ("Segmenter", "segmenter")):
        cells = [
            float(row["value"])
            for metric in ("retention_of_ceiling", "macro_f1")
            for view in ("as-is", "off-center")
            for row in rows("protocol", backbone="vit-small", method=method, metric=metric, view=view, budget="0.3")
        ]
        assert [cell.rstrip("⁰¹²³⁴⁵⁶⁷⁸⁹") for cell in shown[title][1:5]] == [f"{100 * cell:.1f}" for cell in cells]
    printed = {row["metric"]: row["value"] for row in paper_rows("lats")}
    assert shown["LATS (paper)"][-2:] == [f"{100 * float(printed['retention']) / 69.0:.1f}", f"{float(printed['macro_f1']):.1f}"]


def test_the_table_of_splits_has_the_numbers_of_its_file_and_no_lesion_in_both_parts() -> None:
    heads, _, *lines = table(RESULTS / "index.md", "splits")
    place = heads.index("*Border contrast*")
    for line, split in zip(lines[1::2], ("grouped", "without-HAM10000", "without-MSK"), strict=True):
        wanted = {"split": split, "view": "off-center", "method": "border-contrast", "budget": "0.3"}
        (kept,), (f1,) = (rows("splits", metric=metric, **wanted) for metric in ("retention_of_ceiling", "macro_f1"))
        assert line[place] == f"{100 * float(kept['value']):.1f}/{100 * float(f1['value']):.1f}"
        assert line[3] == f"{int(kept['n']):,}"
    assert [line[2] for line in lines] == ["0", ""] * 3


def paper_rows(method: str) -> list[dict[str, str]]:
    with (REPOSITORY / "src" / "medtokenbudget" / "runs" / "paper.csv").open(encoding="utf-8") as file:
        found = csv.DictReader(file)
        return [row for row in found if (row["table"], row["name"], row["budget"]) == ("robustness", method, "0.3")]


def test_ties_share_a_group_and_no_better_group_comes_later() -> None:
    for metric in ("retention_of_ceiling", "macro_f1"):
        for view in ("as-is", "off-center"):
            ranked = rows("leaderboard", backbone="vit-small", metric=metric, view=view)
            measured = [(float(row["value"]), float(row["tie"])) for row in ranked if row["value"]]
            assert measured == sorted(measured, key=lambda pair: (-pair[0], pair[1]))

    shown = {line[0] for line in table(RESULTS / "index.md", "protocol")}
    for row in rows("leaderboard", backbone="vit-small", metric="macro_f1", view="off-center"):
        title = look(row["method"]).title + " (one seed)" * (float(row["seeds"]) == 1)
        assert title in {name.replace("*", "") for name in shown}


@pytest.mark.parametrize("name", [*PAGES, "README"])
def test_the_text_repeats_only_numbers_of_the_tables_on_its_page(name: str) -> None:
    page = REPOSITORY / "README.md" if name == "README" else RESULTS / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    if name == "README":
        text = text[text.index("## What it shows") : text.index("## How it compares")]
    tables = " ".join(found for _, found in TABLE.findall(text))
    said = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", TABLE.sub("", text), flags=re.DOTALL)
    known = set(re.findall(r"\d+\.\d+", tables)) | {"0.1", "0.3", "0.5"}
    assert set(re.findall(r"\d+\.\d+", said)) <= known


def test_the_pages_keep_to_their_length_and_name_their_source() -> None:
    pages = {page.stem for page in RESULTS.glob("*.md")}
    assert set(PAGES) <= pages <= {*PAGES, "beyond-skin"}
    for name, most in PAGES.items():
        text = prose(RESULTS / f"{name}.md")
        assert len(text.split()) <= most, name
        for word in ("seed", "backbone", "commit"):
            assert word in text.lower(), f"{name}.md does not say its {word}"
        for target in re.findall(r"\]\(([\w/-]+\.(?:csv|svg))\)", (RESULTS / f"{name}.md").read_text(encoding="utf-8")):
            assert (RESULTS / target).exists(), f"{name}.md: {target}"


def test_every_file_of_results_belongs_to_a_page(script: ModuleType) -> None:
    text = " ".join(page.read_text(encoding="utf-8") for page in {*script.PAGES, *RESULTS.glob("*.md")})
    for file in (*RESULTS.glob("*.csv"), *RESULTS.glob("figures/*")):
        assert file.name in text, f"no page links {file.name}"


def test_further_measurements_are_those_of_their_files() -> None:
    shown = table(RESULTS / "index.md", "further")
    (promise,) = rows("guarantee", scores="router", retention="0.95", coverage="")
    (abroad,) = rows("external", metric="retention_of_ceiling", budget="0.3")
    assert shown[2][1:3] == [f"{float(promise['tokens']):.1f}", promise["fixed"]]
    assert shown[-1][1] == f"{100 * float(abroad['here']):.1f}"


def test_early_routing_shows_the_record_of_its_study() -> None:
    shown = {line[0]: line for line in table(RESULTS / "early-routing.md", "early-routing")}
    (row,) = rows("early-routing", table="validation", way="scout-0.3", view="off-center")
    assert shown["scout, 76 patches from block 0"][4] == f"{float(row['macro_f1']):.1f}"


def test_the_speed_of_a_wrapped_model_is_shown_for_all_batches_and_threads_with_the_memory_of_a_step(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["what,shape,batch,threads,way,speed,milliseconds,mib,rounds,load"]
    for what, batch, threads, speed in [
        ("forward", 1, 1, 2.1),
        ("forward", 16, 1, 3.2),
        ("forward", 1, 2, 4.3),
        ("step", 8, 1, 5.4),
    ]:
        lines += [f"{what},ViT,{batch},{threads},{way},{value},9.9,,5,0.1" for way, value in (("dense", 1), ("wrap", speed))]
    lines += ["forward,ViT,16,1,wrap,3.25,9.9,,5,0.1", "memory,ViT,8,,dense,,,700,1,", "memory,ViT,8,,wrap,,,200,1,"]
    (tmp_path / "wrap.csv").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    forward, step = (script.wrap_table(what).splitlines()[2:] for what in ("forward", "step"))
    assert forward == ["| ViT | 1 | 2.10x, 3.25x |", "| ViT | 2 | 4.30x |"], "measured again: the last counts"
    assert step == ["| ViT | 700 | 5.40x, 200 |"]
