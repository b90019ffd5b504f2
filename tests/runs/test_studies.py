"""The studies of the paper and ours, on drawn images: shapes of the paper's tables, controls, ceilings, the paper's protocol."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from safetensors import safe_open

import medtokenbudget as mtb
from medtokenbudget.backbone import extract
from medtokenbudget.config import PAPER_METHODS, TrainConfig, preset
from medtokenbudget.errors import MedTokenBudgetError, RequestError, UnknownNameError
from medtokenbudget.heads import list_heads
from medtokenbudget.measures import METRICS
from medtokenbudget.routing import list_selectors, selector_class
from medtokenbudget.runs import Method, Run, paper
from medtokenbudget.runs.run import RESULT_COLUMNS, headline, summarize
from medtokenbudget.runs.studies import PROTOCOL, STUDIES, Study, chosen_studies
from tests.backbone.tiny import CONFIG, tiny_backbone, tiny_manifest
from tests.drawn import Drawn, quick


@pytest.fixture(scope="module")
def everything(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Every study of the paper and ours, once."""
    config = quick("paper", "lats", "context", "center", protocol="paper", epochs=1, head_epochs=1)
    return mtb.reproduce(drawn.manifest_path, drawn.store_path, tmp_path_factory.mktemp("reproduce"), "all", config, jobs=1)


@pytest.mark.slow
def test_every_study_runs_and_has_the_shape_of_the_papers_table(everything: Run) -> None:
    results = everything.results
    assert list(results.columns) == list(RESULT_COLUMNS)
    assert set(results["study"]) == set(STUDIES) - {"kvasir"}
    for study in set(results["study"]) & set(paper.STUDIES):
        table = paper.beside_paper(results, study)
        theirs = table[table["paper"].notna()]
        assert len(theirs) == len(paper.table(study)), study
        assert theirs["ours"].notna().all(), study
    assert "robustness on drawn dermoscopy" in paper.comparison(results, "isic")
    assert paper.comparison(results, everything.source) == "", "nobody compares drawn images with the paper's"
    assert "lats:lesion-first" in headline(results)
    for study, rows in results.groupby("study"):
        assert study == "subset" or {"center", "darkness", "oracle"} <= set(rows["method"]), "every study shows the controls"


@pytest.mark.slow
def test_results_are_the_summary_of_the_predictions_and_nothing_else(everything: Run) -> None:
    summary = summarize(everything.predictions, everything.classes).astype({"seed": "int64"})
    pd.testing.assert_frame_equal(summary, everything.results, rtol=1e-8, check_dtype=False)


@pytest.mark.slow
def test_off_center_views_are_rows_of_their_own(everything: Run) -> None:
    results = everything.results
    off = results[results["view"] == "off-center"]
    assert set(off["study"]) == {"recipe"}
    center = results[(results["study"] == "recipe") & (results["method"] == "center") & (results["budget"] == 0.3)]
    share = center.groupby("view")["retention_of_ceiling"].mean()
    assert share["off-center"] < share["as-is"] - 0.1


@pytest.mark.slow
def test_the_oracle_reaches_the_ceiling_and_no_method_passes_it(everything: Run) -> None:
    results = everything.results
    oracle = results[results["method"] == "oracle"]
    assert oracle["retention_of_ceiling"].to_numpy() == pytest.approx(1.0)
    others = results[(results["method"] != "no-pruning") & results["retention"].notna()]
    assert (others["retention"] <= others["ceiling"] + 1e-9).all()


@pytest.mark.slow
def test_patch_orders_are_kept_for_the_report_and_a_toggle_uses_the_training_of_lats(everything: Run) -> None:
    with safe_open(str(everything.path / "routing.safetensors"), framework="numpy") as stream:
        names = set(stream.keys())
        order = stream.get_tensor("order/lats/42")
    assert {"order/center/42", "scores/lats/42", "lesion", "covered", "off-center/order/lats/42"} <= names
    assert (order[:, :1] != order[:, 1:2]).all()
    assert not (everything.path / "units" / "lats~no-norm-42" / "checkpoint.safetensors").exists()
    assert (everything.path / "units" / "lats-42" / "checkpoint.safetensors").exists()


def test_every_study_says_how_a_report_shows_it() -> None:
    for study in STUDIES.values():
        assert study.title or study.form == "special", study.name
        assert set(study.metrics) <= set(METRICS)


def test_all_means_the_studies_that_fit_the_data_set() -> None:
    assert [study.name for study in chosen_studies(["all"], "kvasir")] == ["kvasir"]
    assert "kvasir" not in [study.name for study in chosen_studies(["all"], "isic")]


def test_the_zoo_has_every_selector_every_head_and_masks_against_no_masks() -> None:
    study = chosen_studies(["zoo"], "isic")[0]
    methods = [Method.parse(text) for text in study.methods]
    assert {method.selector for method in methods} == {name for name in list_selectors() if not selector_class(name).reads_pixels}
    assert {method.head for method in methods} == set(list_heads())
    learned = {method.selector for method in methods if method.learned}
    for selector in learned:
        assert {"", "mask-free", "lesion-first"} <= {method.variant for method in methods if method.selector == selector}
    assert {"lats+transmil:lesion-first", "center+abmil", "oracle+linear"} <= set(study.methods)
    assert len(study.methods) == len(set(study.methods))
    assert "zoo" not in [study.name for study in chosen_studies(["all"], "isic")]
    assert [study.name for study in chosen_studies(["all", "zoo"], "kvasir")] == ["kvasir", "zoo"]


@pytest.mark.parametrize("seeds", [None, (7,)])
def test_the_protocol_is_a_sweep_with_every_control_under_one_recipe_for_heads(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seeds: tuple[int, ...] | None
) -> None:
    asked: list[tuple[Run, Study]] = []
    monkeypatch.setattr("medtokenbudget.runs.sweep.run_studies", lambda run, studies, *_: asked.append((run, studies[0])))
    monkeypatch.setattr("medtokenbudget.api.save_model", lambda run: None)
    mtb.sweep(drawn.manifest_path, drawn.store_path, tmp_path, ["protocol"], seeds=seeds)
    (run, study) = asked[0]
    assert "Skipping segmenter" in capsys.readouterr().err, "the store has no scores of one"
    assert set(study.methods) == set(PROTOCOL.methods) - {"segmenter"} >= {*PAPER_METHODS, "center", "border-contrast", "oracle"}
    assert (study.name, study.seeds, study.budgets) == ("protocol", seeds or (42, 43, 44), (0.1, 0.3, 0.5))
    configs = {name: Method.parse(name).config(run.config) for name in study.methods if name != "lats"}
    heads = {(one.recipe, one.views, one.head_epochs, one.protocol, one.lr, one.budgets) for one in configs.values()}
    assert heads == {("lesion-first", "all", 30, "strict", 1e-3, (0.1, 0.3, 0.5))}


def test_a_study_that_does_not_fit_the_data_is_refused(drawn: Drawn, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="about Kvasir v2, but this manifest comes from synthetic"):
        mtb.reproduce(drawn.manifest_path, drawn.store_path, tmp_path / "run", "kvasir", quick("paper"))
    manifest = tiny_manifest(tmp_path / "images", 12)
    extract(manifest, tmp_path / "tokens", tiny_backbone(tmp_path / "backbone"), CONFIG)
    path = manifest.write(tmp_path / "m.parquet")
    with pytest.raises(MedTokenBudgetError):
        mtb.reproduce(path, tmp_path / "tokens", tmp_path / "run", "all", quick("paper", device="cuda:99"))


def test_an_unknown_study_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'robustness'"):
        chosen_studies(["robustnes"], "isic")


@pytest.mark.parametrize(
    ("config", "protocol"),
    [
        (None, "paper"),
        (preset("paper"), "paper"),
        (preset("paper", head_epochs=1), "paper"),
        (preset("paper", protocol="strict"), "strict"),
        (preset("paper", protocol="paper"), "paper"),
    ],
)
def test_a_reproduction_follows_the_protocol_of_the_paper_unless_another_is_given(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TrainConfig | None, protocol: str
) -> None:
    used: list[TrainConfig] = []
    monkeypatch.setattr("medtokenbudget.runs.sweep.run_studies", lambda run, *rest, **more: used.append(run.config))
    monkeypatch.setattr("medtokenbudget.api.save_model", lambda run: None)
    mtb.reproduce(drawn.manifest_path, drawn.store_path, tmp_path, "subset", config)
    assert [settings.protocol for settings in used] == [protocol]
