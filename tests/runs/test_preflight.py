"""What is refused before anything is trained, and that a refusal leaves an earlier run as it was."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from medtokenbudget.backbone import extract
from medtokenbudget.cli import main
from medtokenbudget.config import DEFAULT_METHODS, LATSConfig, LossWeights, RouterConfig, TrainConfig
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MismatchError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.runs import Execution, sweep
from medtokenbudget.runs.preflight import check_config, supported_methods
from medtokenbudget.runs.run import read_results
from medtokenbudget.runs.sweep import Sources
from tests.backbone.tiny import CONFIG, contents, tiny_backbone, tiny_manifest
from tests.drawn import Drawn, quick

BAD = {
    "no epochs": ({"epochs": 0}, "`epochs` must be at least 1, got 0"),
    "no head epochs and no batch": ({"head_epochs": 0, "batch_size": 0}, "`head_epochs` must be .* `batch_size` must be"),
    "a budget in percent": ({"budgets": (0.3, 30.0)}, "`budgets` must be above 0 and at most 1, got 30"),
    "no budget": ({"budgets": ()}, "got none"),
    "a signal with a typing error": ({"lats": LATSConfig(signals=("attention", "nrom"))}, "nrom.*norm"),
    "a device that is not there": ({"device": "cuda:99"}, "Device 'cuda:99' is not available"),
    "a lesion recipe without the lesion": (
        {"recipe": "lesion-first", "losses": LossWeights(lesion=0.0)},
        "losses.lesion must be above 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_no_training_can_be_made_with_are_refused(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises((RequestError, UnknownNameError), match=message):
        check_config(replace(TrainConfig(device="cpu"), **changes))
    check_config(TrainConfig(device="cpu"))


def _labeled(manifest: Manifest) -> Manifest:
    return manifest.take(np.flatnonzero(manifest.rows["label"].notna()))


def _files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_a_refused_command_leaves_the_run_as_it_was(drawn: Drawn, tmp_path: Path) -> None:
    common = (drawn.manifest_path, drawn.store_path, tmp_path)
    sweep(*common, methods=["center", "norm"], config=quick("paper", "center"), execution=Execution(jobs=1))
    before = _files(tmp_path)
    with pytest.raises(MismatchError, match=r"head_epochs: expected 3, found 2\n.*another --out"):
        sweep(*common, methods=["center", "norm"], config=quick("paper", "center", head_epochs=3), execution=Execution(jobs=1))
    with pytest.raises(RequestError, match="contains results of norm-42, which this command leaves out"):
        sweep(*common, methods=["center"], config=quick("paper", "center"), execution=Execution(jobs=1))
    assert _files(tmp_path) == before
    more = sweep(*common, methods=["center", "norm", "random"], config=quick("paper", "center"), execution=Execution(jobs=1))
    assert set(more["method"]) == {"center", "norm", "random"}


def test_a_manifest_without_labels_and_a_store_of_another_are_refused(drawn: Drawn, tmp_path: Path) -> None:
    bare = drawn.manifest.with_columns(label=[None] * len(drawn.manifest)).write(tmp_path / "bare.parquet")
    with pytest.raises(RequestError, match="No training image has a label"):
        sweep(bare, drawn.store_path, tmp_path / "run", methods=["center"], config=quick("paper", "center"))
    labels = drawn.manifest.rows["label"].tolist()
    labels[drawn.manifest.rows["split"].tolist().index("train")] = None
    some = drawn.manifest.with_columns(label=labels)
    with pytest.raises(RequestError, match=r"1 of \d+ training images have no label"):
        sweep(some, drawn.store_path, tmp_path / "run", methods=["center"], config=quick("paper", "center"))
    other = tiny_manifest(tmp_path / "images", 8).with_columns(label=["MEL", "NV"] * 4)
    with pytest.raises(RequestError, match=r"has none of the images of this manifest. Run `mtb extract"):
        sweep(other, drawn.store_path, tmp_path / "run", methods=["center"], config=quick("paper", "center"))
    assert not (tmp_path / "run").exists()


def test_data_without_validation_images_are_refused_before_the_training(drawn: Drawn, tmp_path: Path) -> None:
    learned = Manifest.read(drawn.manifest_path).part("train")
    for manifest in (learned, learned.without_labels()):
        path = manifest.write(tmp_path / f"{len(manifest.classes)}.parquet")
        with pytest.raises(RequestError, match=r"is in the part 'val', so there is nothing to measure with.*mtb data split"):
            sweep(path, drawn.store_path, tmp_path / "run", methods=["center"], config=quick("paper", "center"))
    assert not (tmp_path / "run").exists()


def test_a_report_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == RequestError.exit_code
    assert "is not a run directory" in capsys.readouterr().err


def test_training_without_masks_stops_before_any_work_and_the_advice_works_in_the_same_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tiny_manifest(tmp_path / "images", 16, masks=False)
    extract(manifest, tmp_path / "tokens", tiny_backbone(tmp_path / "backbone"), CONFIG)
    path, out = _labeled(manifest).write(tmp_path / "m.parquet"), tmp_path / "run"
    command = ["train", str(path), "--store", str(tmp_path / "tokens"), "--out", str(out)]
    small = ["--epochs", "1", "--head-epochs", "1", "--device", "cpu"]
    assert main([*command, *small]) == RequestError.exit_code
    said = capsys.readouterr().err
    assert "lats:lesion-first needs lesion masks, but no training image has one" in said
    assert not out.exists()
    assert main([*command, *small, "--preset", "paper", "--losses.lesion", "0"]) == 0
    assert set(read_results(out / "results.csv")["method"]) == {"lats", "center", "random"}


def test_off_center_views_that_the_store_does_not_have_are_an_error(tmp_path: Path) -> None:
    manifest = tiny_manifest(tmp_path / "images", 12)
    extract(manifest, tmp_path / "tokens", tiny_backbone(tmp_path / "backbone"), CONFIG)
    with pytest.raises(RequestError, match=r"Training on off-center views was requested, but store .* has none"):
        sweep(
            _labeled(manifest),
            tmp_path / "tokens",
            tmp_path / "run",
            ["center"],
            config=quick("paper", "center", views="off-center"),
        )
    assert not (tmp_path / "run").exists()


def test_without_masks_the_default_methods_are_those_that_need_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tiny_manifest(tmp_path / "images", 16, masks=False)
    store = extract(manifest, tmp_path / "tokens", tiny_backbone(tmp_path / "backbone"), CONFIG)
    sources = Sources.of(manifest, store, tmp_path / "run")
    fitting = supported_methods(sources, DEFAULT_METHODS, quick("lesion-first"))
    assert set(DEFAULT_METHODS) - set(fitting) == {"lats:lesion-first", "oracle"}
    assert "Skipping lats:lesion-first, oracle" in capsys.readouterr().err


def test_budgets_without_the_headline_one_and_both_spellings_of_options(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path), "--epochs", "1"]
    small = [
        "--head-epochs",
        "1",
        "--batch-size=16",
        "--lats.hidden",
        "16",
        "--lats.layers",
        "1",
        "--min-steps",
        "0",
        "--device",
        "cpu",
    ]
    assert main([*command, *small, "--budgets", "0.1", "0.5"]) == 0
    assert "at budget 0.1: accuracy" in capsys.readouterr().err
    assert contents(tmp_path / "model")


@pytest.mark.slow
def test_a_head_that_needs_more_tokens_than_the_smallest_budget_keeps_is_rejected_before_training(
    drawn: Drawn, tmp_path: Path
) -> None:
    config = replace(quick("paper", "center"), router=RouterConfig(minimum=4))
    methods, out = ("center", "no-pruning+clam-sb", "center+clam-mb"), tmp_path / "run"
    with pytest.raises(RequestError, match=r"Head 'clam-mb' of center\+clam-mb needs at least 16 tokens, but budget 0.05 keeps"):
        sweep(drawn.manifest_path, drawn.store_path, out, methods=methods, budgets=(0.05, 0.5), config=config)
    assert not (out / "units").exists()


@pytest.mark.slow
def test_a_store_without_the_signals_of_a_method_is_rejected_before_anything_is_trained(drawn: Drawn, tmp_path: Path) -> None:
    shutil.copytree(drawn.store_path, tmp_path / "tokens")
    for name in ("mean_key", "rollout"):
        for path in (tmp_path / "tokens").glob(f"signal-*-{name}.safetensors"):
            path.unlink()
    with pytest.raises(MissingSignalError, match=r"has no mean_key, rollout for .* with --signals mean_key rollout"):
        sweep(drawn.manifest_path, tmp_path / "tokens", tmp_path / "run", methods=("center", "rollout", "tome:keys"))
    assert not (tmp_path / "run" / "units").exists()
