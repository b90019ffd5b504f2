"""`mtb export`: a folder for the hub and ONNX files, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import medtokenbudget as mtb
from medtokenbudget.cli import main
from medtokenbudget.model import MedTokenBudget
from tests import processes
from tests.small_model import small_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def model(root: Path) -> MedTokenBudget:
    made = small_model(root / "weights", baselines=("random",))
    made.save_pretrained(root / "model")
    return made


def test_the_hub_folder_is_the_same_model_without_this_machine_s_paths(root: Path, model: MedTokenBudget, tmp_path: Path) -> None:
    assert main(["export", str(root / "model"), "--format", "hub", "--out", str(tmp_path / "hub")]) == 0
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["backbone"]["weights"] == "vit-0.safetensors"
    assert mtb.load(tmp_path / "hub").fingerprint == model.fingerprint


@pytest.mark.slow
def test_an_onnx_file_is_written_and_reported_as_checked(
    root: Path, model: MedTokenBudget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    command = ["export", str(root / "model"), "--part", "routing", "--budget", "0.1", "--out", str(tmp_path)]
    assert main(command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["routing-lats-0.1.onnx"]
    assert capsys.readouterr().err.count("checked against PyTorch") == 1


def test_a_method_that_draws_at_random_is_not_exported(
    root: Path, model: MedTokenBudget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(root / "model"), "--out", str(tmp_path), "--selector", "random"]) == 2
    assert "is random" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("format", ["hub", "onnx"])
def test_a_full_disk_or_a_read_only_folder_is_a_message(root: Path, model: MedTokenBudget, tmp_path: Path, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    part = ["--part", "routing"] if format == "onnx" else []
    command = ["export", root / "model", "--format", format, *part, "--out"]
    full = processes.run([*command, tmp_path / "out"], tmp_path / "log", processes.Limits(file_bytes=2000))
    assert full.code == 1
    assert "No space left while writing" in full.said
    assert "Traceback" not in full.said
    assert not list((tmp_path / "out").iterdir())
    ended = processes.run([*command, closed], tmp_path / "log", processes.Limits(obey_permissions=True))
    assert ended.code == 1
    assert "Permission denied. Choose a folder that you can write to." in ended.said
    assert "Traceback" not in ended.said
