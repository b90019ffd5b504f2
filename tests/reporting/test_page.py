"""The report of a run: traceable numbers, repeatable bytes, a self-contained page, and runs that lack a part."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from playwright.sync_api import Browser

from medtokenbudget.api import report
from medtokenbudget.cli import main
from medtokenbudget.config import NOTICE
from medtokenbudget.errors import RequestError
from medtokenbudget.reporting.examples import examples
from medtokenbudget.reporting.intervals import ReportRun
from medtokenbudget.reporting.page import build
from medtokenbudget.runs.run import headline, read_results
from tests.reporting.fake_run import edit_run, fake_run

pytestmark = pytest.mark.slow

WIDER = """() => [...document.querySelectorAll('.scroll')]
    .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.getAttribute('aria-label'))"""
UNFOLD = "() => document.querySelectorAll('.section').forEach(section => { section.open = true })"
VOID = {"meta", "img", "br", "link", "input", "hr"}
CONTROLS = ("Center", "Darkness", "Random", "Oracle")
FEW = ("no-pruning", "random", "lats", "lats:lesion-first", "center", "oracle")
FIGURES = [
    "retention",
    "share-of-ceiling",
    "accuracy",
    "macro-f1",
    "accuracy-against-retention",
    "reliability",
    "center-bias",
    "size-strata",
    "class-strata",
    "curriculum",
    "scores",
    "retention-model",
    "examples",
]


class Outline(HTMLParser):
    """What a browser and a screen reader meet: headings, ids, loaded addresses, pictures without a text, unclosed elements."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.silent: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if values.get("id"):
            self.ids.append(str(values["id"]))
        self.loaded += [str(values[name]) for name in ("src", "href", "xlink:href", "data", "srcset") if values.get(name)]
        if (tag == "img" and not values.get("alt")) or (values.get("role") == "img" and not values.get("aria-label")):
            self.silent.append(tag)
        if tag == "svg" and values.get("aria-hidden") != "true":
            self.silent.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(run: Path, name: str) -> pd.DataFrame:
    """A table of a report."""
    return pd.read_csv(run / "tables" / f"{name}.csv")


def cells(run: Path, study: str, method: str) -> pd.DataFrame:
    """The rows of results.csv of one method at budget 0.3."""
    results = pd.read_csv(run / "results.csv")
    return results[(results["study"] == study) & (results["method"] == method) & (results["budget"] == 0.3)]


def test_the_page_is_well_formed_accessible_and_loads_nothing_from_elsewhere(run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Outline()
    page.feed(text)
    assert page.open == page.silent == []
    assert page.headings[0] == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:]))
    assert len(page.ids) == len(set(page.ids))
    assert {address[1:] for address in page.loaded if address.startswith("#")} <= set(page.ids)
    assert all(address.startswith(("data:image/jpeg;base64,", "#", "tables/")) for address in page.loaded)
    assert all((run / address).is_file() for address in page.loaded if address.startswith("tables/"))
    assert not any(loading in text for loading in ("url(http", "@import", "<script"))
    assert len(text.encode()) < 6_000_000


def test_the_page_says_what_was_measured_and_what_it_is_not(run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    assert NOTICE in text
    assert "Token selection on My clinic" in text
    assert "24 validation images of “My clinic”" in text
    assert "simply keeping the image center" in text
    assert re.search(r"Worst of 24</b> \d+% of lesion kept, of \d+% reachable", text)
    assert "@off-center" not in text
    assert "Not shown" not in text
    for name in CONTROLS:
        assert f'<th scope="row">{name}</th>' in text


def test_every_figure_is_there_as_svg_with_text_and_as_png_without_a_date(run: Path) -> None:
    for name in FIGURES:
        svg = (run / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        assert "<text" in svg
        assert "dc:date" not in svg
        assert (run / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_numbers_of_the_main_table_are_those_of_results_csv(run: Path) -> None:
    results = pd.read_csv(run / "results.csv")
    main_rows = results[results["study"] == "main"].set_index(["method", "budget"])
    table = read(run, "main")
    assert set(table["method"]) == set(main_rows.index.get_level_values("method"))
    for row in table.itertuples():
        assert row.value == pytest.approx(main_rows.loc[(row.method, row.budget), row.metric], abs=1e-5)
        assert row.low - 1e-9 <= row.value <= row.high + 1e-9
    assert "tome" not in set(table.loc[table["metric"] == "retention", "method"])


def test_the_text_of_a_table_holds_the_numbers_of_its_csv(run: Path) -> None:
    sweep = read(run, "retention-sweep")
    lines = (run / "tables" / "retention-sweep.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("|")[1].strip(): [cell.strip(" *") for cell in line.split("|")[2:-2]] for line in lines if line[:2] == "| "}
    for method, name in (("lats", "LATS (paper)"), ("center", "Center"), ("ceiling", "Ceiling")):
        assert rows[name] == [f"{100 * value:.1f}" for value in sweep.loc[sweep["method"] == method, "value"]]
    assert rows["ToMe"] == ["—"] * 10


def test_every_study_has_its_table_with_the_controls_and_the_deviation_over_seeds(run: Path) -> None:
    names = ("main", "robustness", "mask-free", "signals", "curriculum", "toggles", "center-bias", "paired-seeds", "recipe")
    for name in names:
        text = (run / "tables" / f"{name}.md").read_text(encoding="utf-8")
        assert all(control in text for control in CONTROLS), name
    accuracy = cells(run, "robustness", "lats")["accuracy"]
    lines = (run / "tables" / "robustness.md").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("| 0.3 | LATS (paper) |"))
    assert f"{100 * accuracy.mean():.1f} ± {100 * accuracy.std(ddof=1):.1f}" in row


def test_the_recipe_table_has_a_row_per_part_and_both_views(run: Path) -> None:
    results, table = cells(run, "recipe", "lats:lesion-first-raster"), read(run, "recipe")
    rows = table[(table["method"] == "lats:lesion-first-raster") & (table["budget"] == 0.3)]
    for view in ("as-is", "off-center"):
        for metric in ("retention_of_ceiling", "macro_f1", "balanced_accuracy"):
            ours = rows[(rows["view"] == view) & (rows["metric"] == metric)]["value"].item()
            assert ours == pytest.approx(results[results["view"] == view][metric].item(), abs=1e-5)
    assert "lesion-first with 1D contrast" in (run / "tables" / "recipe.md").read_text(encoding="utf-8")


def test_all_tests_are_in_the_file_and_the_headline_comparisons_on_the_page(run: Path) -> None:
    tests = read(run, "significance")
    assert {"as-is", "off-center"} == set(tests["view"])
    assert {"lats:lesion-first", "lats"} == set(tests["method"])
    assert {"center", "random", "lats"} <= set(tests.loc[tests["method"] == "lats:lesion-first", "minus_method"])
    page = (run / "report.html").read_text(encoding="utf-8")
    assert 6 < page.split('id="table-significance"')[1].split("</table>")[0].count("<tr") < 20 < len(tests)
    assert f"Download all {len(tests)} tests" in page
    assert max(table.count("<tr") for table in page.split("<table>")[1:]) < 50, "no table is longer than a screen or two"


def test_the_papers_numbers_stand_next_to_ours_with_the_difference(run: Path) -> None:
    table, ours = read(run, "beside-paper"), cells(run, "main", "lats")["retention"].item()
    row = table[(table["study"] == "main") & (table["method"] == "lats") & (table["metric"] == "retention")].iloc[0]
    assert row["paper"] == 67.4
    assert row["ours"] == pytest.approx(100 * ours, abs=1e-3)
    assert row["difference"] == pytest.approx(100 * ours - 67.4, abs=1e-3)


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with the seeds of the paper; 8 of its 24 images have no mask, so the oracle classifies 16."""
    folder = tmp_path_factory.mktemp("seeds") / "run"
    fake_run(folder, seeds=(42, 43, 44), studies=("main", "robustness"), images=False, unmasked=8)
    report(folder)
    return folder


def test_the_papers_three_seed_numbers_are_shown_beside_those_of_one_seed(three_seeds: Path) -> None:
    rows = [line.split(" | ") for line in (three_seeds / "tables" / "beside-paper.md").read_text(encoding="utf-8").splitlines()]
    shown = {(row[0].lstrip("| "), row[1], row[2]): row for row in rows if len(row) == 7}
    accuracy = cells(three_seeds, "robustness", "lats")["accuracy"]
    row = shown["robustness", "Accuracy (%)", "LATS (paper)"]
    assert row[3:5] == ["80.4 ± 0.2", f"{100 * accuracy.mean():.1f} ± {100 * accuracy.std(ddof=1):.1f}"]
    assert row[6] == "3 |"
    assert shown["main", "Accuracy (%)", "LATS (paper)"][6] == "1 |"
    for method in ("Random", "ToMe"):
        assert ("robustness", "Macro F1 (%)", method) in shown


@pytest.mark.parametrize(("file", "method"), [("paired-seeds", "lats:lesion-first"), ("paired-seeds-paper", "lats")])
def test_our_method_and_the_papers_are_compared_with_every_baseline_seed_by_seed(three_seeds: Path, file: str, method: str) -> None:
    results = pd.read_csv(three_seeds / "results.csv")
    cells = {(r.method, r.seed, r.budget): r for r in results[results["study"] == "robustness"].itertuples()}
    table = pd.read_csv(three_seeds / "tables" / f"{file}.csv").set_index(["method_a", "method_b", "budget", "metric"])
    for other in ("random", "tome", "center", "darkness"):
        for metric in ("accuracy", "macro_f1", "retention"):
            gaps = [getattr(cells[method, s, 0.3], metric) - getattr(cells[other, s, 0.3], metric) for s in (42, 43, 44)]
            if other == "tome" and metric == "retention":
                assert (method, other, 0.3, metric) not in table.index
                continue
            row = table.loc[(method, other, 0.3, metric)]
            mean = sum(gaps) / 3
            assert row["mean"] == pytest.approx(mean, abs=1e-6)
            assert row["std"] == pytest.approx((sum((gap - mean) ** 2 for gap in gaps) / 2) ** 0.5, abs=1e-6)
            assert row["seeds"] == 3
    assert f'id="table-{file}"' in (three_seeds / "report.html").read_text(encoding="utf-8")


def test_numbers_over_other_images_have_their_own_n_and_no_paired_difference(three_seeds: Path) -> None:
    accuracy = cells(three_seeds, "main", "oracle")["accuracy"].item()
    page = (three_seeds / "report.html").read_text(encoding="utf-8")
    assert "24 (Oracle: 16) images" in page
    assert f"Oracle {100 * accuracy:.1f}% (n = 16)" in page  # the text of the figure
    assert f"Oracle {100 * accuracy:.1f} (n = 16)" in (three_seeds / "figures" / "accuracy.svg").read_text(encoding="utf-8")
    table = pd.read_csv(three_seeds / "tables" / "paired-seeds.csv")
    assert set(table[table["method_b"] == "oracle"]["metric"]) == {"retention"}
    results = read_results(three_seeds / "results.csv")
    assert "oracle classified 16" in headline(results)
    assert "oracle" not in headline(results.assign(n=results["n"].mask(results["method"] == "oracle", 0))).splitlines()[-1]
    assert headline(read_results(three_seeds / "results.csv").assign(n=0)).endswith("\nn = 16 images with a lesion mask")


@pytest.mark.parametrize(
    ("source", "study", "quoted"), [("kvasir", "kvasir", True), ("kvasir", "main", False), ("folder photos", "main", False)]
)
def test_the_papers_figures_are_quoted_only_for_its_own_data_sets(source: str, study: str, quoted: bool, tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", n=8, seeds=(42,), studies=(study,), images=False, source=source, methods=FEW)
    text = report(folder).read_text(encoding="utf-8")
    assert (folder / "tables" / "beside-paper.csv").exists() == quoted
    assert ("numbers are for Kvasir v2" in text) == quoted
    for isic in ("5,067", "the paper: 155", "Paper: ", "ISIC 2019"):
        assert isic not in text, isic


def test_the_worst_kept_images_are_listed_from_the_predictions(run: Path) -> None:
    rows = pd.read_parquet(run / "predictions.parquet")
    rows = rows[(rows["study"] == "main") & (rows["method"] == "lats:lesion-first") & np.isclose(rows["budget"], 0.3)]
    share = rows["kept_lesion"] / np.minimum(rows["lesion"], rows["k"])
    table = read(run, "worst")
    assert table["of_possible"].iloc[0] == pytest.approx(share.min(), abs=1e-5)
    assert table["of_possible"].is_monotonic_increasing


def test_latex_is_balanced_and_escaped(run: Path) -> None:
    for path in sorted((run / "tables").glob("*.tex")):
        text = path.read_text(encoding="utf-8")
        bare = re.sub(r"\\[{}]", "", text)
        assert bare.count("{") == bare.count("}"), path.name
        for environment in ("table", "tabular"):
            assert text.count(rf"\begin{{{environment}}}") == text.count(rf"\end{{{environment}}}") == 1
        body = text.split("\\midrule", 1)[1].split("\\bottomrule")[0]
        columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text).group(1)
        for line in body.splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1, (path.name, line)
        assert not re.search(r"(?<!\\)[_%#]", body), path.name
        assert text.isascii() or not set(text) & set("—–−±×Δβσ≤≥"), path.name


def test_a_second_report_writes_the_same_bytes(run: Path, tmp_path: Path) -> None:
    again = tmp_path / run.name
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("tables", "figures", "report.html"))
    report(again)
    for path in sorted(run.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (again / path.relative_to(run)).read_bytes(), path.name


def test_a_run_without_masks_or_images_reports_accuracy_and_says_what_is_missing(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "bare", n=16, seeds=(42,), studies=("main",), masked=False, images=False, methods=FEW)
    (folder / "metrics.jsonl").unlink()
    text = report(folder).read_text(encoding="utf-8")
    assert "none with a lesion mask" in text
    assert "Not shown" in text
    assert (folder / "figures" / "accuracy.svg").exists()
    assert not (folder / "figures" / "retention.svg").exists()
    assert "retention" not in set(read(folder, "main")["metric"])


def test_a_number_changed_in_results_csv_changes_page_tables_sentences_and_json(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "edited", n=16, seeds=(42,), studies=("main",), images=False, methods=FEW)
    results = pd.read_csv(folder / "results.csv")
    cell = (results["method"] == "lats:lesion-first") & (results["budget"] == 0.3)
    results.loc[cell, ["retention", "accuracy", "ece"]] = [0.12345, 0.54321, 0.4567]
    results.to_csv(folder / "results.csv", index=False)
    edit_run(folder)
    built = build([folder], pictures=False)
    text = built.page.read_text(encoding="utf-8")
    assert '<span class="value">12.3%</span>' in text
    assert "keeps 12.3% of the lesion, of" in text
    for name, value in (("main", "12.3 ["), ("main", "54.3 ["), ("retention-sweep", "12.3"), ("further-measures", "45.7")):
        row = next(r for r in (folder / "tables" / f"{name}.md").read_text().splitlines() if r.startswith("| LATS lesion-first"))
        assert value in row, name
    assert "ECE 45.7%" in (folder / "figures" / "reliability.svg").read_text()
    assert built.numbers["runs"][0]["methods"]["lats:lesion-first"]["retention"]["value"] == 0.12345


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with another package's learned selector, whose image files are gone."""
    methods = ("no-pruning", "random", "lookout", "center", "darkness", "oracle")
    folder = tmp_path_factory.mktemp("theirs") / "run"
    fake_run(folder, n=16, seeds=(42,), studies=("main",), methods=methods, learned=("lookout",))
    shutil.rmtree(folder / "data")
    report(folder)
    return folder


def test_images_out_of_reach_leave_only_the_pictures_out(theirs: Path) -> None:
    text = (theirs / "report.html").read_text(encoding="utf-8")
    assert "cannot be read" in text
    assert "<img" not in text
    assert (theirs / "figures" / "retention.svg").exists()
    assert not (theirs / "figures" / "examples.svg").exists()


def test_a_run_of_another_packages_selector_is_reported_like_our_own(theirs: Path) -> None:
    text = (theirs / "report.html").read_text(encoding="utf-8")
    assert "of the lesion kept by lookout at budget 0.3" in text
    assert "The text follows lookout (<code>lookout</code>), the model that <code>mtb predict</code> uses." in text
    assert re.search(r"lookout is (better|not clearly better|worse) than simply keeping the image center", text)
    assert "LATS (paper)" not in text.split('id="glossary"')[0].split('id="paper"')[0]
    assert (theirs / "figures" / "scores.svg").exists()


def test_a_run_without_a_trained_selector_says_so_and_can_be_reported_elsewhere(tmp_path: Path) -> None:
    methods = ("no-pruning", "random", "norm", "center", "oracle")
    folder = fake_run(tmp_path / "untrained", n=16, seeds=(42,), studies=("main",), methods=methods, learned=())
    before = sorted(path.name for path in folder.iterdir())
    page = report(folder, out=tmp_path / "there")
    assert page == tmp_path / "there" / "report.html"
    assert sorted(path.name for path in folder.iterdir()) == before
    text = page.read_text(encoding="utf-8")
    assert "No selector was trained in this run, so the text follows NormBased" in text
    assert "of the lesion kept by NormBased at budget 0.3" in text
    assert "What explains it" in text
    assert not (tmp_path / "there" / "figures" / "scores.svg").exists()


def test_the_command_prints_where_the_page_is_and_rejects_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    with pytest.raises(RequestError, match=r"run\.json"):
        report(tmp_path)


def test_the_page_works_under_a_policy_that_runs_and_loads_nothing(chromium: Browser, run: Path, tmp_path: Path) -> None:
    page = chromium.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto((run / "report.html").resolve().as_uri())
    assert refused == []  # the page itself needs nothing that the policy refuses
    page.get_by_text("Reproducibility").click()
    page.get_by_text("run.json: the full configuration").click()
    assert page.locator("details pre").is_visible()
    page.get_by_text("At each budget").click()
    assert page.evaluate("() => document.images.length && [...document.images].every(image => image.naturalWidth > 0)")
    assert page.evaluate("() => getComputedStyle(document.querySelector('.key i')).backgroundColor") != "rgba(0, 0, 0, 0)"
    assert page.evaluate("() => document.querySelector('.plate svg').getBoundingClientRect().width") > 100
    strange = "<script>document.title = 'ran'</script><img id=strange src=x.png><link rel=stylesheet href=s.css>"
    text = (run / "report.html").read_text(encoding="utf-8")
    (tmp_path / "report.html").write_text(text.replace("<main>", f"<main>{strange}"), encoding="utf-8")
    (tmp_path / "s.css").write_text("body { display: none }")
    shutil.copy(run / "figures" / "retention.png", tmp_path / "x.png")
    page.goto((tmp_path / "report.html").as_uri())
    assert page.title() != "ran"
    assert page.locator("h1").is_visible()
    assert page.evaluate("() => document.getElementById('strange').naturalWidth") == 0
    page.close()


def test_names_from_a_data_set_are_text_on_the_page(tmp_path: Path) -> None:
    strange = "<script>alert('x')</script>"
    folder = fake_run(tmp_path / "run", n=8, seeds=(42,), studies=("main",), images=False, dataset=strange, methods=FEW)
    edit_run(folder, command=f"mtb sweep {strange}", hashes={strange: strange})
    text = report(folder).read_text(encoding="utf-8")
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(") >= 5  # title, heading, lead, command, hash


@pytest.mark.parametrize("width", [1280, 390])
def test_no_table_is_wider_than_its_box_on_a_desktop_and_no_page_than_its_window(chromium: Browser, run: Path, width: int) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900})
    page.goto((run / "report.html").resolve().as_uri())
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.evaluate(UNFOLD)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    if width == 1280:
        assert page.evaluate(WIDER) == []
    page.close()


def test_the_first_screen_shows_best_median_and_worst_and_three_numbers_next_to_a_control(chromium: Browser, run: Path) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto((run / "report.html").resolve().as_uri())
    bottom = page.evaluate("() => document.querySelector('.facts').getBoundingClientRect().bottom")
    assert bottom < 900
    assert [text.split(" of ")[0] for text in page.locator(".example > figcaption b").all_inner_texts()] == [
        "Best",
        "Median",
        "Worst",
    ]
    facts = page.locator(".facts li").all_inner_texts()
    assert len(facts) == 3
    assert all("Strongest control: " in fact for fact in facts)
    assert "reachable" in facts[0]
    assert page.locator(".section[open]").count() == 0
    page.evaluate(UNFOLD)
    # Every study of the paper in one run: the longest page there is.
    assert page.evaluate("() => document.body.innerText.trim().split(/\\s+/).length") <= 3000
    assert page.evaluate("() => document.documentElement.scrollHeight") <= 6.5 * 900
    page.close()


def test_best_and_median_are_of_lesions_that_fit_where_such_images_tie(run: Path) -> None:
    read = ReportRun.read(run)
    shown = {example.reason: example.image_id for example in examples(read)}
    orders = read.orders
    assert orders is not None
    seed = orders.seed_of(read.focus)
    assert seed is not None
    share, size = orders.share_of_possible(read.focus, seed, read.k), orders.lesion.sum(1)
    median = np.sort(share[~np.isnan(share)])[np.isfinite(share).sum() // 2]
    tied = share == median
    assert set(size[tied] > read.k) == {True, False}, "nothing to choose from"
    rows = {reason: orders.image_ids.index(name) for reason, name in shown.items()}
    assert share[rows["median"]] == median
    assert size[rows["median"]] <= read.k
    assert size[rows["best"]] == size[(share == share[rows["best"]]) & (size <= read.k)].max()
    assert share[rows["worst"]] == np.nanmin(share)


def test_the_headline_compares_with_the_strongest_control_and_what_is_reachable(run: Path) -> None:
    at = {name: cells(run, "main", name).iloc[0] for name in ("lats:lesion-first", "center", "darkness", "random")}
    ours, best = at.pop("lats:lesion-first"), max(at, key=lambda name: at[name]["retention"])
    text = (run / "report.html").read_text(encoding="utf-8")
    headline = text.split('<p class="headline">')[1].split("</p>")[0]
    assert f"keeps {100 * ours['retention']:.1f}% of the lesion, of {100 * ours['ceiling']:.1f}% reachable" in headline
    assert f"{best.capitalize()}, the strongest control, with {100 * at[best]['retention']:.1f}%." in headline
