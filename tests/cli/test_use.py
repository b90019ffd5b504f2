"""`mtb predict` and `mtb export`: tables, tokens, pictures, folders for the hub, and what cannot be read or written."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from medtokenbudget.cli import main
from medtokenbudget.files import read_json, read_lines
from medtokenbudget.model import MedTokenBudget, load
from tests.small_model import CLASSES, draw_images, small_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved model."""
    folder = tmp_path_factory.mktemp("use")
    small_model(folder / "weights", baselines=("tome", "center")).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def model(root: Path) -> MedTokenBudget:
    return load(root / "model", device="cpu")


@pytest.fixture(scope="module")
def images(root: Path) -> list[Path]:
    return draw_images(root / "images", 6)


def run(root: Path, *arguments: object) -> int:
    return main(["predict", *map(str, arguments), "--model", str(root / "model"), "--device", "cpu"])


def test_csv_and_parquet_hold_the_model_s_own_answers(
    root: Path, model: MedTokenBudget, images: list[Path], tmp_path: Path
) -> None:
    for table in ("p.csv", "p.parquet"):
        assert run(root, images[0].parent, "--out", tmp_path / table, "--budget", 0.2) == 0
    wanted = model.predict(images, budget=0.2)
    table = pd.read_parquet(tmp_path / "p.parquet")
    with open(tmp_path / "p.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == list(table.columns)
    assert len(rows) == len(table) == 6
    for answer, row, line in zip(wanted, table.itertuples(), rows):
        assert row.image == line["image"] == answer.image
        assert row.label == line["label"] == answer.label
        assert (row.k, row.n_patches, row.budget) == (20, 100, 0.2)
        assert row.kept.tolist() == [int(value) for value in line["kept"].split()] == answer.kept.tolist()
        for name in CLASSES:
            assert np.float32(line[f"p_{name}"]) == np.float32(getattr(row, f"p_{name}"))
            assert getattr(row, f"p_{name}") == pytest.approx(answer.probabilities[name], abs=1e-6)


def test_files_globs_and_folders_can_be_mixed(root: Path, images: list[Path], tmp_path: Path) -> None:
    given = (images[5], str(images[0].parent / "image-00[12].jpg"))
    assert run(root, *given, "--out", tmp_path / "p.csv") == 0
    assert pd.read_csv(tmp_path / "p.csv")["image"].tolist() == [str(images[i]) for i in (5, 1, 2)]


def test_the_token_file_has_a_row_for_each_row_of_the_table(
    root: Path, model: MedTokenBudget, images: list[Path], tmp_path: Path
) -> None:
    for kind, exact in (("fp16", np.float16), ("fp32", np.float32)):
        path = tmp_path / "tokens.safetensors"
        assert run(root, *images, "--out", tmp_path / "p.csv", "--tokens", "--tokens_dtype", kind) == 0
        tensors = load_file(path)
        for row, answer in enumerate(model.predict(images)):
            assert tensors["indices"][row].tolist() == answer.kept.tolist()
            assert tensors["tokens"].dtype == exact
            np.testing.assert_allclose(tensors["tokens"][row], answer.tokens, atol=1e-6 if kind == "fp32" else 5e-3)
        with safe_open(str(path), framework="np") as reader:
            assert reader.metadata()["model"] == model.fingerprint


def test_a_merger_has_tokens_but_no_kept_patches(root: Path, images: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "p.parquet"
    assert run(root, images[0], "--out", out, "--selector", "tome", "--tokens") == 0
    assert pd.read_parquet(out)["kept"].isna().all()
    assert set(load_file(tmp_path / "tokens.safetensors")) == {"tokens"}


def test_bad_files_are_listed_and_the_others_are_predicted(
    root: Path, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = tmp_path / os.fsdecode(b"caf\xe9.jpg")
    shutil.copy(images[1], strange)
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "cut.jpg").write_bytes(images[0].read_bytes()[:1500])
    bad = [strange, tmp_path / "text.png", tmp_path / "cut.jpg", tmp_path / "absent.jpg"]
    for table, read in (("p.csv", pd.read_csv), ("p.parquet", pd.read_parquet)):
        assert run(root, images[0], *bad, images[1], "--out", tmp_path / table) == 0
        assert "4 of 6 images could not be read" in capsys.readouterr().err
        assert read(tmp_path / table)["image"].tolist() == [str(images[0]), str(images[1])]
        errors = read_lines(tmp_path / "p.errors.jsonl")
        assert [error["image"] for error in errors] == [str(path) for path in bad]
        assert "is not valid UTF-8" in errors[0]["reason"]
        assert all(error["reason"] for error in errors)
    assert run(root, images[0], "--out", tmp_path / "p.csv") == 0
    assert not (tmp_path / "p.errors.jsonl").exists(), "the list of an earlier call"


def test_when_no_image_can_be_read_the_work_has_failed_and_no_table_appears(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, tmp_path / "absent.jpg", "--out", tmp_path / "p.csv", "--tokens") == 1
    said = capsys.readouterr().err
    assert "No image could be read (1 failed). The first: " in said
    assert "does not exist" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.errors.jsonl"]


@pytest.mark.slow
def test_memory_stays_flat_however_many_images(root: Path, model: MedTokenBudget, images: list[Path], tmp_path: Path) -> None:
    script = """
import ctypes, os, sys
from pathlib import Path
import psutil
from medtokenbudget.model import load
from medtokenbudget.model.batch import RouteConfig, predict_files
folder, image, out = sys.argv[1:]
model, process = load(folder, device="cpu"), psutil.Process()
trim = getattr(ctypes.CDLL(None), "malloc_trim", abs)  # what is free but not given back varies by 10 MB
sizes = []
for number, count in enumerate((60, 450, 900)):
    images = (Path(image) for _ in range(count))
    predict_files(images, Path(out) / str(number) / "p.parquet", model, RouteConfig(1.0, tokens=True))
    trim(0)
    sizes.append(process.memory_info().rss / 2**20)
print(sizes[2] - sizes[1], os.path.getsize(Path(out) / "2/tokens.safetensors") / 2**20)
"""
    command = [sys.executable, "-c", script, str(root / "model"), str(images[0]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    growth, written = map(float, done.stdout.split())
    assert written > 10, "the tokens must be more than the memory that may be used"
    assert growth < written / 3, f"memory grew by {growth:.0f} MB while {written:.0f} MB of tokens were written"


def test_the_hub_folder_is_the_same_model_without_this_machine_s_paths(root: Path, model: MedTokenBudget, tmp_path: Path) -> None:
    assert main(["export", str(root / "model"), "--format", "hub", "--out", str(tmp_path / "hub")]) == 0
    assert read_json(tmp_path / "hub" / "config.json")["backbone"]["weights"] == "vit-0.safetensors"
    assert load(tmp_path / "hub").fingerprint == model.fingerprint
