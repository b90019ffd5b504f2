"""What is refused before anything is trained, and that a refusal leaves an earlier run as it was."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from medtokenbudget.cli import main
from medtokenbudget.config import LATSConfig, LossWeights, TrainConfig
from medtokenbudget.errors import MedTokenBudgetError, MismatchError, RequestError, UnknownNameError, WorkError
from medtokenbudget.experiments import reproduce, sweep
from medtokenbudget.experiments.preflight import check_config
from medtokenbudget.features import extract
from tests.drawn import Drawn, quick
from tests.features.tiny import CONFIG, contents, tiny_backbone, tiny_manifest

BAD = {
    "no epochs": ({"epochs": 0}, "epochs must be 1 or more, got 0"),
    "no head epochs and no batch": ({"head_epochs": 0, "batch_size": 0}, "head_epochs must be .*; batch_size must be"),
    "a budget in percent": ({"budgets": (0.3, 30.0)}, r"shares of the patches in \(0, 1\], got 30"),
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


def _files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_a_refused_command_leaves_the_run_as_it_was(drawn: Drawn, tmp_path: Path) -> None:
    common = (drawn.manifest_path, drawn.store_path, tmp_path)
    sweep(*common, methods=["center", "norm"], config=quick("paper"), jobs=1)
    before = _files(tmp_path)
    with pytest.raises(MismatchError, match=r"head_epochs: expected 3, found 2\n.*another --out"):
        sweep(*common, methods=["center", "norm"], config=quick("paper", head_epochs=3), jobs=1)
    with pytest.raises(RequestError, match="holds results of norm-42, which this command leaves out"):
        sweep(*common, methods=["center"], config=quick("paper"), jobs=1)
    assert _files(tmp_path) == before
    more = sweep(*common, methods=["center", "norm", "random"], config=quick("paper"), jobs=1)
    assert set(more["method"]) == {"center", "norm", "random"}


def test_a_manifest_without_labels_and_a_store_of_another_are_refused(drawn: Drawn, tmp_path: Path) -> None:
    bare = drawn.manifest.with_columns(label=[None] * len(drawn.manifest)).write(tmp_path / "bare.parquet")
    with pytest.raises(RequestError, match="no training image of the manifest has a label"):
        sweep(bare, drawn.store_path, tmp_path / "run", methods=["center"], config=quick("paper"))
    turned = replace(drawn.manifest, classes=drawn.manifest.classes[::-1]).write(tmp_path / "turned.parquet")
    with pytest.raises(MismatchError, match="classes: expected"):
        sweep(turned, drawn.store_path, tmp_path / "run", methods=["center"], config=quick("paper"))
    assert not (tmp_path / "run").exists()


def test_a_study_that_does_not_fit_the_data_is_refused(drawn: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match=r"numbers for Kvasir v2; this manifest is of synthetic"):
        reproduce(drawn.manifest_path, drawn.store_path, tmp_path / "run", "kvasir", quick("paper"))
    manifest = tiny_manifest(tmp_path / "images", 12)
    extract(manifest, tmp_path / "tokens", tiny_backbone(tmp_path / "backbone"), CONFIG)
    path = manifest.write(tmp_path / "m.parquet")
    with pytest.raises(RequestError, match=r"no off-center views.*--views off-center"):
        reproduce(path, tmp_path / "tokens", tmp_path / "run", ["center-bias"], quick("paper"))
    with pytest.raises(MedTokenBudgetError):
        reproduce(path, tmp_path / "tokens", tmp_path / "run", "all", quick("paper", epochs=0))
    assert "'center-bias' is left out" in capsys.readouterr().err


def test_a_script_without_a_guard_is_told_so(drawn: Drawn, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import medtokenbudget as mtb\n"
        "from medtokenbudget.config import TrainConfig\n"
        f"mtb.sweep({str(drawn.manifest_path)!r}, {str(drawn.store_path)!r}, {str(tmp_path / 'run')!r}, ['center', 'norm'],\n"
        "          config=TrainConfig(head_epochs=1, device='cpu'), jobs=2)\n"
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert 'must do so below `if __name__ == "__main__":`; jobs=1 needs none' in ended.stderr


def test_a_report_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == RequestError.exit_code
    assert "is not a run directory" in capsys.readouterr().err


def test_training_on_images_without_masks_ends_with_the_reason_and_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tiny_manifest(tmp_path / "images", 16, masks=False)
    extract(manifest, tmp_path / "tokens", tiny_backbone(tmp_path / "backbone"), CONFIG)
    command = [
        "train",
        str(manifest.write(tmp_path / "m.parquet")),
        "--store",
        str(tmp_path / "tokens"),
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*command, "--epochs", "1", "--head_epochs", "1", "--device", "cpu"]) == WorkError.exit_code
    said = capsys.readouterr().err
    assert "lesion masks" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "results.csv").exists()


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
    assert main([*command, *small, "--budgets", "[0.1,0.5]"]) == 0
    assert "at budget 0.1: accuracy" in capsys.readouterr().err
    assert contents(tmp_path / "model")
