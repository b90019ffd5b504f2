"""Bad checkpoints, manifests and runs: rejected with the file named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest
from medtokenbudget.errors import MedTokenBudgetError
from medtokenbudget.tensor_files import load_tensors, save_tensors
from tests.bad_input.damage import NESTED, cut, damage, flip, write
from tests.reporting.fake_run import fake_run


@pytest.mark.parametrize(
    ("change", "says"),
    [(cut, "damaged or incomplete"), (flip, "damaged or incomplete"), (lambda data: b"", "damaged or incomplete")],
    ids=["half", "flipped bit", "empty"],
)
def test_a_bad_checkpoint_is_named(tmp_path: Path, change: Callable[[bytes], bytes], says: str) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_tensors(path, {"a": torch.arange(100.0)}, {"epoch": 1})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MedTokenBudgetError, match=says) as caught:
        load_tensors(path)
    assert str(path) in str(caught.value)


def parquet(**columns: Any) -> Callable[[Path], None]:
    return lambda path: pd.DataFrame(columns).to_parquet(path)


MANIFESTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "does not exist|no such|cannot"),
    "a folder": (lambda path: path.mkdir(), "folder|directory|not a"),
    "empty": (lambda path: path.write_bytes(b""), "m.parquet"),
    "text": (lambda path: path.write_bytes(b"image_id,image\n1,a.jpg\n"), "m.parquet"),
    "half": (lambda path: (parquet(image_id=["a"] * 99)(path), path.write_bytes(cut(path.read_bytes()))), "m.parquet"),
    "other columns": (parquet(name=["a"]), "m.parquet"),
    "without metadata": (
        parquet(image_id=["a"], image=["a.jpg"], label=["x"], mask=[None], group=[None], split=["train"]),
        "m.parquet",
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_bad_manifest_is_named(tmp_path: Path, case: str) -> None:
    make, says = MANIFESTS[case]
    path = tmp_path / "m.parquet"
    make(path)
    with pytest.raises(MedTokenBudgetError, match=f"(?i){says}") as caught:
        Manifest.read(path)
    assert "m.parquet" in str(caught.value)


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("run"), studies=("main",), images=False)


def run_json(name: str, value: Any = ...) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / "run.json").read_text())
        if value is ...:
            del values[name]
        else:
            values[name] = value
        (folder / "run.json").write_text(json.dumps(values))

    return change


RUNS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no run.json": (lambda folder: (folder / "run.json").unlink(), "run.json"),
    "run.json is text": (write("run.json", b"hello"), "run.json is not valid JSON"),
    "run.json is a list": (write("run.json", b"[]"), "run.json is damaged"),
    "run.json is nested": (write("run.json", NESTED), "run.json is nested too deeply"),
    "another version": (run_json("format_version", 1), "format version 1"),
    "no classes": (run_json("classes"), "run.json"),
    "classes is text": (run_json("classes", "MEL"), "run.json"),
    "methods is a list": (run_json("methods", []), "run.json"),
    "a method is text": (run_json("methods", {"center": "x"}), "run.json"),
    "seeds is a number": (run_json("seeds", 42), "run.json"),
    "no results": (lambda folder: (folder / "results.csv").unlink(), "results.csv"),
    "results are empty": (write("results.csv", b""), "results.csv"),
    "results are bytes": (write("results.csv", b"\xff\xfe\x00"), "results.csv"),
    "results of another version": (write("results.csv", b"a,b\n1,2\n"), "results.csv"),
    "results have text for numbers": (damage("results.csv", lambda d: d.replace(b"0.", b"x.")), "results.csv"),
    "no predictions": (lambda folder: (folder / "predictions.parquet").unlink(), "predictions.parquet"),
    "half the predictions": (damage("predictions.parquet", cut), "predictions.parquet"),
    "half the patch orders": (damage("routing.safetensors", cut), "routing.safetensors"),
    "patch orders are text": (write("routing.safetensors", b"hello"), "routing.safetensors"),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_bad_run_is_rejected_with_the_file_named(
    good_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    change, says = RUNS[case]
    run = Path(shutil.copytree(good_run, tmp_path / "run"))
    change(run)
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
