"""The sweep and the studies, on drawn images: shapes of the paper's tables, same bytes again, failures that do not spread."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import safe_open

from medtokenbudget.config import BUDGETS, preset
from medtokenbudget.errors import RequestError, UnknownNameError
from medtokenbudget.runs import paper, reproduce, sweep
from medtokenbudget.runs.execution import Execution
from medtokenbudget.runs.methods import Method, method_of
from medtokenbudget.runs.results import RESULT_COLUMNS, read_predictions, read_results, summarize
from medtokenbudget.runs.studies import STUDIES, chosen_studies
from medtokenbudget.runs.summary import comparison, headline
from medtokenbudget.runs.units import FILES as UNIT_FILES
from medtokenbudget.runs.units import Plan, Unit, run_unit
from medtokenbudget.files import read_json, read_lines
from medtokenbudget.routing import Ranker, list_selectors, register_selector
from medtokenbudget.heads import list_heads
from medtokenbudget.routing.base import SELECTORS
from tests.drawn import Drawn, quick

FILES = ("results.csv", "predictions.parquet", "routing.safetensors", "run.json")


@pytest.fixture(scope="module")
def everything(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every study of the paper and ours, once."""
    out = tmp_path_factory.mktemp("reproduce")
    reproduce(
        drawn.manifest_path,
        drawn.store_path,
        out,
        "all",
        quick("paper", "lats", "context", "center", protocol="paper"),
        Execution(jobs=1),
    )
    return out


@pytest.mark.slow
def test_every_study_runs_and_has_the_shape_of_the_papers_table(everything: Path) -> None:
    results = read_results(everything / "results.csv")
    assert list(results.columns) == list(RESULT_COLUMNS)
    assert set(results["study"]) == set(STUDIES) - {"kvasir"}
    for study in set(results["study"]) & set(paper.STUDIES):
        table = paper.beside_paper(results, study)
        theirs = table[table["paper"].notna()]
        assert len(theirs) == len(paper.table(study)), study
        assert theirs["ours"].notna().all(), study
    assert "robustness on drawn dermoscopy" in comparison(results)
    assert "lats:lesion-first" in headline(results)


@pytest.mark.slow
def test_every_study_shows_the_controls(everything: Path) -> None:
    results = read_results(everything / "results.csv")
    for study, rows in results.groupby("study"):
        if study != "subset":
            assert {"center", "darkness", "oracle"} <= set(rows["method"]), study


@pytest.mark.slow
def test_results_are_the_summary_of_the_predictions_and_nothing_else(everything: Path) -> None:
    predictions, classes = read_predictions(everything / "predictions.parquet")
    pd.testing.assert_frame_equal(
        summarize(predictions, classes).astype({"seed": "int64"}),
        read_results(everything / "results.csv"),
        rtol=1e-8,
        check_dtype=False,
    )


@pytest.mark.slow
def test_off_center_views_are_rows_of_their_own(everything: Path) -> None:
    results = read_results(everything / "results.csv")
    assert set(results["dataset"]) == {"drawn dermoscopy"}
    off = results[results["view"] == "off-center"]
    assert set(off["study"]) == {"center-bias", "recipe"}
    center = results[(results["study"] == "center-bias") & (results["method"] == "center") & (results["budget"] == 0.3)]
    share = center.groupby("view")["retention_of_ceiling"].mean()
    assert share["off-center"] < share["as-is"] - 0.1


@pytest.mark.slow
def test_the_oracle_reaches_the_ceiling_and_no_method_passes_it(everything: Path) -> None:
    results = read_results(everything / "results.csv")
    oracle = results[results["method"] == "oracle"]
    assert oracle["retention_of_ceiling"].to_numpy() == pytest.approx(1.0)
    others = results[(results["method"] != "no-pruning") & results["retention"].notna()]
    assert (others["retention"] <= others["ceiling"] + 1e-9).all()


@pytest.mark.slow
def test_patch_orders_of_all_rankers_are_kept_for_the_report(everything: Path) -> None:
    with safe_open(str(everything / "routing.safetensors"), framework="numpy") as stream:
        names = set(stream.keys())
        order = stream.get_tensor("order/lats/42")
    assert {"order/center/42", "scores/lats/42", "lesion", "covered", "off-center/order/lats/42"} <= names
    assert (order[:, :1] != order[:, 1:2]).all()


@pytest.mark.slow
def test_a_toggle_uses_the_training_of_lats(everything: Path) -> None:
    assert not (everything / "units" / "lats~no-norm-42" / "checkpoint.safetensors").exists()
    assert (everything / "units" / "lats-42" / "checkpoint.safetensors").exists()


def _sweep(drawn: Drawn, out: Path, **options: object) -> pd.DataFrame:
    execution = {name: options.pop(name) for name in ("jobs", "engine") if name in options}
    methods = options.get("methods", ("lats:lesion-first", "random", "center", "tome"))
    defaults = {"methods": methods, "config": quick("lesion-first", *methods)}  # type: ignore[misc]
    how = Execution(**{"jobs": 1, **execution})  # type: ignore[arg-type]
    return sweep(drawn.manifest_path, drawn.store_path, out, **{**defaults, **options}, execution=how)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_second_run_writes_the_same_bytes_and_a_repeated_call_does_no_work(drawn: Drawn, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    first = _sweep(drawn, tmp_path / "a")
    _sweep(drawn, tmp_path / "b")
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "units").rglob("unit.json")}
    assert _sweep(drawn, tmp_path / "a").equals(first)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert set(first["budget"]) == set(BUDGETS)


@pytest.mark.slow
def test_a_selector_that_is_trained_without_its_head_is_trained_once_for_all_heads(drawn: Drawn, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    _sweep(drawn, tmp_path / "all", methods=("lats+abmil:lesion-first", "lats+linear:lesion-first", "lats:lesion-first"))
    _sweep(drawn, tmp_path / "alone", methods=("lats+abmil:lesion-first",))
    unit = Path("units", "lats+abmil~lesion-first-42")
    for name in ("checkpoint.safetensors", *UNIT_FILES):
        assert (tmp_path / "all" / unit / name).read_bytes() == (tmp_path / "alone" / unit / name).read_bytes(), name
    rows = {folder.name: _selector_rows(folder) for folder in (tmp_path / "all" / "units").iterdir()}
    shared = rows["lats~lesion-first-42"]
    assert len(shared) == 2
    assert all(found == shared for found in rows.values()), "the seconds of an epoch are the same only if it ran once"
    assert _selector_rows(tmp_path / "alone" / unit) != shared


def _selector_rows(unit: Path) -> list[dict[str, Any]]:
    return [row for row in read_lines(unit / "metrics.jsonl") if row["stage"] == "selector"]


@pytest.mark.slow
def test_two_processes_write_the_same_bytes_as_one(drawn: Drawn, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    _sweep(drawn, tmp_path / "one", methods=("random", "center"))
    _sweep(drawn, tmp_path / "two", methods=("random", "center"), jobs=2)
    assert (tmp_path / "one" / "predictions.parquet").read_bytes() == (tmp_path / "two" / "predictions.parquet").read_bytes()


@pytest.mark.parametrize(("jobs", "threads"), [(2, 4), (0, 4), (1, 3)])
def test_the_last_unit_of_a_run_that_goes_on_has_the_threads_of_the_others(
    drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, threads: int
) -> None:
    """Another number of threads changes the last bit of a training."""
    seen = []

    def look(plan: Plan, unit: Unit, **options: object) -> str:
        seen.append(torch.get_num_threads())
        return run_unit(plan, unit)

    monkeypatch.setattr(sys.modules["medtokenbudget.runs.execution"], "run_unit", look)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _sweep(drawn, tmp_path, methods=("center",))
        seen.clear()
        _sweep(drawn, tmp_path, methods=("center", "no-pruning"), jobs=jobs)
        assert (seen, torch.get_num_threads()) == ([threads], 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_ray_cluster_writes_the_same_bytes_as_local_processes(drawn: Drawn, tmp_path: Path, ray: Any) -> None:
    torch.set_num_threads(1)
    methods = ("center", "no-pruning")
    _sweep(drawn, tmp_path / "local", methods=methods)
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        _sweep(drawn, tmp_path / "ray", methods=methods, engine="ray")
    finally:
        ray.shutdown()
    assert (tmp_path / "ray" / "results.csv").read_bytes() == (tmp_path / "local" / "results.csv").read_bytes()


def test_a_selector_that_fails_does_not_stop_the_others_and_the_same_command_tries_it_again(drawn: Drawn, tmp_path: Path) -> None:
    broken = True

    @register_selector("moody")
    class Moody(Ranker):
        def score(self, tokens, generator=None):  # type: ignore[no-untyped-def]
            if broken:
                raise RuntimeError("not today")
            return tokens.patches.norm(dim=-1)

    try:
        results = _sweep(drawn, tmp_path, methods=("center", "moody"))
        assert set(results["method"]) == {"center"}
        assert "not today" in read_json(tmp_path / "units" / "moody-42" / "unit.json")["error"]
        center = (tmp_path / "units" / "center-42" / "unit.json").stat().st_mtime_ns
        broken = False
        again = _sweep(drawn, tmp_path, methods=("center", "moody"))
        assert set(again["method"]) == {"center", "moody"}
        assert (tmp_path / "units" / "center-42" / "unit.json").stat().st_mtime_ns == center
    finally:
        SELECTORS.unregister("moody")


def test_unknown_methods_variants_and_studies_are_refused_before_any_work(drawn: Drawn, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'center'"):
        _sweep(drawn, tmp_path, methods=("centre",))
    with pytest.raises(UnknownNameError, match="Did you mean 'mask-free'"):
        Method.parse("lats:maskfree")
    with pytest.raises(UnknownNameError, match="Did you mean 'robustness'"):
        chosen_studies(["robustnes"], "isic")


def test_a_variant_of_another_preset_keeps_the_size_of_the_sweep() -> None:
    usual = Method.parse("lats:lesion-first").config(preset("paper", seed=7))
    assert usual == preset("lesion-first", seed=7)
    short = Method.parse("lats:lesion-first").config(quick("paper", epochs=5))
    assert (short.epochs, short.min_steps, short.lats.hidden, short.lats.neighborhood) == (5, 0, 16, "grid8")


@pytest.mark.parametrize("base", ["paper", "lesion-first"])
def test_a_name_means_the_same_recipe_whatever_the_settings_of_the_run(base: str) -> None:
    assert Method.parse("lats").config(preset(base)) == preset("paper")
    assert Method.parse("lats:lesion-first").config(preset(base)) == preset("lesion-first")
    assert Method.parse("lats:mask-free").config(preset(base)).losses.lesion == 0
    changed = preset(base, lr=0.5)
    assert method_of("lats", changed).config(changed) == changed, "the run's own recipe keeps the options that were typed"


@pytest.mark.parametrize("text", ["lats", "center", "lats:lesion-first", "lats:no-norm", "random:matched"])
def test_the_text_of_a_method_comes_back(text: str) -> None:
    assert str(Method.parse(text)) == text
    assert Method.parse(f"{text.partition(':')[0]}+mlp") == Method(text.partition(":")[0])


def test_an_ablation_uses_the_training_of_its_selector() -> None:
    method = Method.parse("lats:no-norm")
    assert (method.ablation, method.trained_as) == ("no-norm", Method("lats"))
    assert method.config(preset("paper")) == preset("paper")
    assert Method.parse("lats:mask-free").trained_as == Method.parse("lats:mask-free")


@pytest.mark.parametrize("text", ["", ":x", "+mlp", "lats+", "lats+:lesion-first"])
def test_what_is_not_a_method_is_an_error(text: str) -> None:
    with pytest.raises(RequestError, match="is not a method"):
        Method.parse(text)


def test_all_means_the_studies_that_fit_the_data_set() -> None:
    assert [study.name for study in chosen_studies(["all"], "kvasir")] == ["kvasir"]
    assert "kvasir" not in [study.name for study in chosen_studies(["all"], "isic")]


def test_the_zoo_has_every_selector_every_head_and_masks_against_no_masks() -> None:
    study = chosen_studies(["zoo"], "isic")[0]
    methods = [Method.parse(text) for text in study.methods]
    assert {method.selector for method in methods} == set(list_selectors())
    assert {method.head for method in methods} == set(list_heads())
    learned = {method.selector for method in methods if method.learned}
    for selector in learned:
        assert {"", "mask-free", "lesion-first"} <= {method.variant for method in methods if method.selector == selector}
    assert {"lats+transmil:lesion-first", "center+abmil", "oracle+linear"} <= set(study.methods)
    assert len(study.methods) == len(set(study.methods))
    assert "zoo" not in [study.name for study in chosen_studies(["all"], "isic")]
    assert [study.name for study in chosen_studies(["all", "zoo"], "kvasir")] == ["kvasir", "zoo"]
