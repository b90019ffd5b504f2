"""Every kind of selector through a sweep: trained, judged, reported, saved and loaded."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import medtokenbudget as mtb
from medtokenbudget.config import BackboneConfig, RouterConfig
from medtokenbudget.errors import MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.runs import sweep
from medtokenbudget.runs.execution import Execution
from medtokenbudget.runs.methods import Method
from medtokenbudget.runs.run import RunInfo
from medtokenbudget.runs.trained import load_unit
from medtokenbudget.runs.units import Unit
from medtokenbudget.model import MedTokenBudget
from tests.drawn import Drawn, quick

pytestmark = pytest.mark.slow

SOFT = ("tokenlearner", "tc-ssa", "query-pool:lesion-first")
HARD = ("evit", "frequency", "tome:keys", "dynamicvit-package:lesion-first")
KEPT = ("ats", "rollout", "cropr:mask-free", "dynamicvit", "sparselearn:lesion-first", "relevance", "gradcam-norm1", "box-prior")


@pytest.fixture(scope="module")
def run(drawn: Drawn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("zoo")
    methods = (*SOFT, *HARD, *KEPT)
    sweep(
        drawn.manifest_path,
        drawn.store_path,
        out,
        methods=methods,
        budgets=(0.3, 0.5),
        seeds=(42,),
        config=quick("paper", *methods),
        execution=Execution(jobs=1),
    )
    return out


def test_every_method_is_measured_by_what_it_can_lose(run: Path) -> None:
    results = mtb.runs.results.read_results(run / "results.csv")
    for methods, measured in (
        (SOFT, {"lesion_mass"}),
        (HARD, {"purity", "lesion_dominated"}),
        (KEPT, {"retention", "precision"}),
    ):
        rows = results[results["method"].isin(methods)]
        assert set(rows["method"]) == set(methods)
        for name in ("lesion_mass", "purity", "lesion_dominated", "retention", "precision"):
            assert rows[name].notna().all() if name in measured else rows[name].isna().all(), name
    assert results["accuracy"].notna().all()


def test_a_store_without_the_signals_of_a_method_is_rejected_before_anything_is_trained(drawn: Drawn, tmp_path: Path) -> None:
    shutil.copytree(drawn.store_path, tmp_path / "tokens")
    for name in ("mean_key", "rollout"):
        for path in (tmp_path / "tokens").glob(f"signal-*-{name}.safetensors"):
            path.unlink()
    with pytest.raises(MissingSignalError, match=r"has no mean_key, rollout for .* with --signals mean_key rollout"):
        sweep(drawn.manifest_path, tmp_path / "tokens", tmp_path / "run", methods=("center", "rollout", "tome:keys"))
    assert not (tmp_path / "run" / "units").exists()
    with pytest.raises(UnknownNameError, match="variant of center"):
        Method.parse("center:keys")


def test_a_head_that_needs_more_tokens_than_the_smallest_budget_keeps_is_rejected_before_training(
    drawn: Drawn, tmp_path: Path
) -> None:
    config = replace(quick("paper", "center"), router=RouterConfig(minimum=4))
    methods, out = ("center", "no-pruning+clam-sb", "center+clam-mb"), tmp_path / "run"
    with pytest.raises(RequestError, match=r"Head 'clam-mb' of center\+clam-mb needs at least 16 tokens, but budget 0.05 keeps"):
        sweep(drawn.manifest_path, drawn.store_path, out, methods=methods, budgets=(0.05, 0.5), config=config)
    assert not (out / "units").exists()


def test_a_model_computes_the_signals_that_its_selectors_read(run: Path, drawn: Drawn) -> None:
    info = RunInfo.read(run)
    store, manifest = drawn.store, drawn.manifest
    loaded = {name: load_unit(info, Unit(Method.parse(name), 42), store.dim) for name in ("rollout", "tome:keys", "ats")}
    used = store.config["backbone"]
    config = BackboneConfig(used["name"], Path(store.config["weights"]), used["image_size"])
    settings = info.methods["rollout"].train_config
    model = MedTokenBudget(config, store.config["backbone"], info.classes, loaded, settings, main="rollout", device="cpu")
    assert set(model.signals) == {"attention_entropy", "cls_attention", "rollout", "mean_key", "value_norm"}
    image = manifest.image_path(0)
    row = store.rows([manifest.ids[0]])
    kept = model.classifier("rollout").selector.order(store.read(row, signals=("rollout",)))
    assert sorted(model.predict(image, 0.3, "rollout")[0].kept.tolist()) == sorted(kept[0, : model.k(0.3, "rollout")].tolist())
    assert model.predict(image, 0.3, "tome:keys")[0].k == model.k(0.3, "tome:keys")
    model.save_pretrained(run / "saved")
    again = mtb.load(run / "saved", device="cpu")
    assert again.classifier("tome:keys").selector.compare == "keys"
    assert again.predict(image, 0.3, "ats")[0].label == model.predict(image, 0.3, "ats")[0].label


def test_a_finished_unit_is_loaded_with_its_trained_selector(run: Path, drawn: Drawn) -> None:
    info = RunInfo.read(run)
    for method in ("cropr:mask-free", "tc-ssa"):
        classifier = load_unit(info, Unit(Method.parse(method), 42), drawn.store.dim)
        assert classifier is not None
        batch = next(iter(drawn.store.batches(range(4), 4)))
        assert classifier(batch, 0.5).shape == (4, len(info.classes))


@pytest.mark.slow
def test_the_report_of_such_a_run_is_written(run: Path) -> None:
    mtb.report(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "TokenLearner" in page
    assert "Cropr" in page
