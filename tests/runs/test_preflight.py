"""What is refused before anything is trained, and that a refusal leaves an earlier run as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import medtokenbudget as mtb
from medtokenbudget.backbone import extract
from medtokenbudget.cli import main
from medtokenbudget.config import DEFAULT_METHODS, LATSConfig, LossWeights, RouterConfig, TrainConfig
from medtokenbudget.errors import MismatchError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.runs.preflight import check_config, supported_methods
from medtokenbudget.runs.run import Run, read_results
from medtokenbudget.tokens import SIGNALS
from tests.backbone.tiny import CONFIG, tiny_backbone, tiny_manifest
from tests.drawn import Drawn, quick
from tests.small_model import small_backbone

BAD = {
    "no epochs": ({"epochs": 0}, "`epochs` must be at least 1, got 0"),
    "no head epochs and no batch": ({"head_epochs": 0, "batch_size": 0}, "`head_epochs` must be .* `batch_size` must be"),
    "a budget in percent": ({"budgets": (0.3, 30.0)}, "`budgets` must be above 0 and at most 1, got 30"),
    "no budget": ({"budgets": ()}, "got none"),
    "a signal with a typing error": ({"lats": LATSConfig(signals=("attention", "nrom"))}, "nrom.*norm"),
    "a device that is not there": ({"device": "cuda:99"}, "Device 'cuda:99' is not available"),
    "a lesion recipe without the lesion": (
        {"recipe": "lesion-first", "losses": LossWeights(lesion=0.0)},
        "`losses.lesion` must be above 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_no_training_can_be_made_with_are_refused(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises((RequestError, UnknownNameError), match=message):
        check_config(replace(TrainConfig(device="cpu"), **changes))
    check_config(TrainConfig(device="cpu"))


def sweep(drawn: Drawn, out: Path, *methods: str, config: TrainConfig | None = None, manifest: Any = None, **options: Any) -> Run:
    settings, images = config or quick("paper", "center"), drawn.manifest_path if manifest is None else manifest
    return mtb.sweep(images, options.pop("store", drawn.store_path), out, methods, config=settings, jobs=1, **options)


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_a_refused_command_leaves_the_run_as_it_was(drawn: Drawn, tmp_path: Path) -> None:
    sweep(drawn, tmp_path, "center", "norm")
    before = contents(tmp_path)
    with pytest.raises(MismatchError, match=r"head_epochs: expected 3, found 2\n.*another `out`"):
        sweep(drawn, tmp_path, "center", "norm", config=quick("paper", "center", head_epochs=3))
    with pytest.raises(RequestError, match="contains results of norm-42, which this command leaves out"):
        sweep(drawn, tmp_path, "center")
    assert contents(tmp_path) == before
    assert set(sweep(drawn, tmp_path, "center", "norm", "random").results["method"]) == {"center", "norm", "random"}


def test_data_that_nothing_can_be_learned_from_or_measured_with_are_refused(drawn: Drawn, tmp_path: Path) -> None:
    manifest, labels = drawn.manifest, drawn.manifest.rows["label"].tolist()
    labels[manifest.rows["split"].tolist().index("train")] = None
    learned = manifest.part("train")
    no_validation = r"is in the part 'val', so there is nothing to measure with.*mtb data split"
    for images, message in (
        (manifest.with_columns(label=[None] * len(manifest)), "No training image has a label"),
        (manifest.with_columns(label=labels), r"1 of \d+ training images have no label"),
        (tiny_manifest(tmp_path / "images", 8).with_columns(label=["MEL", "NV"] * 4), "has none of the images of this manifest"),
        (learned, no_validation),
        (learned.without_labels(), no_validation),
    ):
        with pytest.raises(RequestError, match=message):
            sweep(drawn, tmp_path / "run", "center", manifest=images)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def without_masks(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Labeled images without masks and without off-center views."""
    folder = tmp_path_factory.mktemp("without-masks")
    manifest = tiny_manifest(folder / "images", 16, masks=False)
    extract(manifest, folder / "tokens", tiny_backbone(folder / "backbone"), CONFIG)
    labeled = manifest.take(np.flatnonzero(manifest.rows["label"].notna()))
    return Drawn(labeled.write(folder / "m.parquet"), folder / "tokens")


def test_training_without_masks_stops_before_any_work_and_the_advice_works_in_the_same_folder(
    without_masks: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["train", without_masks.manifest_path, "--store", without_masks.store_path, "--out", out]
    words = [*map(str, command), "--epochs", "1", "--head-epochs", "1", "--device", "cpu"]
    assert main(words) == RequestError.exit_code
    assert "lats:lesion-first needs lesion masks, but no training image has one" in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--preset", "paper", "--losses.lesion", "0"]) == 0
    assert set(read_results(out / "results.csv")["method"]) == {"lats", "center", "darkness", "border-contrast", "random"}


def test_without_masks_the_default_methods_are_those_that_need_none(
    without_masks: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.begin(tmp_path, without_masks.manifest_path, without_masks.store_path, quick("lesion-first"))
    assert set(DEFAULT_METHODS) - set(supported_methods(run, DEFAULT_METHODS)) == {"lats:lesion-first", "oracle", "segmenter"}
    said = capsys.readouterr().err
    assert "Skipping lats:lesion-first, oracle: no training image has a lesion mask" in said
    assert "Skipping segmenter: the store has no segmenter's scores, which `mtb extract` can add." in said


def test_off_center_views_that_the_store_does_not_have_are_an_error(without_masks: Drawn, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"Training on off-center views was requested, but store .* has none"):
        sweep(without_masks, tmp_path / "run", "center", config=quick("paper", "center", views="off-center"))
    assert not (tmp_path / "run").exists()


def test_budgets_without_the_headline_one_and_both_spellings_of_options(
    drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(drawn.manifest_path), "--store", str(drawn.store_path), "--out", str(tmp_path), "--epochs", "1"]
    small = "--head-epochs 1 --batch-size=16 --lats.hidden 16 --lats.layers 1 --min-steps 0 --device cpu --budgets 0.1 0.5"
    assert main([*command, *small.split()]) == 0
    assert "at budget 0.1: accuracy" in capsys.readouterr().err
    assert contents(tmp_path / "model")


def test_a_head_that_needs_more_tokens_than_the_smallest_budget_keeps_is_rejected_before_training(
    drawn: Drawn, tmp_path: Path
) -> None:
    config = replace(quick("paper", "center"), router=RouterConfig(minimum=4))
    with pytest.raises(RequestError, match=r"Head 'clam-mb' of center\+clam-mb needs at least 16 tokens, but budget 0.05 keeps"):
        sweep(drawn, tmp_path, "center", "no-pruning+clam-sb", "center+clam-mb", budgets=(0.05, 0.5), config=config)
    assert not (tmp_path / "units").exists()


def test_a_store_without_the_signals_of_a_method_is_rejected_before_anything_is_trained(drawn: Drawn, tmp_path: Path) -> None:
    config = replace(CONFIG, signals=tuple(name for name in SIGNALS if name not in ("mean_key", "rollout")))
    extract(drawn.manifest, tmp_path / "tokens", small_backbone(tmp_path), config)
    with pytest.raises(MissingSignalError, match=r"has no mean_key, rollout for .* mean_key rollout"):
        sweep(drawn, tmp_path / "run", "center", "rollout", "tome:keys", store=tmp_path / "tokens")
    assert not (tmp_path / "run" / "units").exists()
