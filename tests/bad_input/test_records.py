"""Bad checkpoints, manifests and runs: rejected with the file named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from medtokenbudget.cli import main
from medtokenbudget.runs.run import Run
from tests.bad_input.damage import NESTED, cut, damage, edit_json, write
from tests.reporting.fake_run import fake_run


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("run"), studies=("main",), images=False)


def flip_middle(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def run_json(name: str, value: Any = ...) -> Callable[[Path], None]:
    def change(values: dict[str, Any]) -> None:
        if value is ...:
            del values[name]
        else:
            values[name] = value

    return lambda folder: edit_json(folder / "run.json", change)


RUNS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no run.json": (lambda folder: (folder / "run.json").unlink(), "run.json"),
    "run.json is text": (write("run.json", b"hello"), "run.json is not valid JSON"),
    "run.json is a list": (write("run.json", b"[]"), "run.json is damaged: expected a JSON object"),
    "run.json is nested": (write("run.json", NESTED), "run.json is nested too deeply"),
    "another version": (run_json("format_version", 1), "format version 1"),
    "no classes": (run_json("classes"), "run.json"),
    "classes is text": (run_json("classes", "MEL"), "run.json"),
    "methods is a list": (run_json("methods", []), "run.json"),
    "a method is text": (run_json("methods", {"center": "x"}), "run.json is damaged: check methods"),
    "a method without its head": (run_json("methods", {"center": {"selector": "center"}}), "run.json is damaged: check methods"),
    "seeds is a number": (run_json("seeds", 42), "run.json is damaged: check seeds"),
    "run.json was edited": (damage("run.json", lambda d: d.replace(b"42", b"43", 1)), "run.json is damaged or was edited"),
    "no predictions": (lambda folder: (folder / "predictions.parquet").unlink(), "predictions.parquet"),
    "half the predictions": (damage("predictions.parquet", cut), "predictions.parquet"),
    "a flipped bit in the predictions": (damage("predictions.parquet", flip_middle), "predictions.parquet is damaged"),
    "a flipped bit in the patch orders": (damage("routing.safetensors", flip_middle), "routing.safetensors is damaged"),
    "another number in the curves": (damage("metrics.jsonl", lambda d: d.replace(b"1", b"2", 1)), "metrics.jsonl is damaged"),
    "curves that are not UTF-8": (damage("metrics.jsonl", lambda d: d[:50] + b"\xff" + d[51:]), "metrics.jsonl is damaged"),
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


RESULTS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda folder: (folder / "results.csv").unlink(),
    "empty": write("results.csv", b""),
    "bytes": write("results.csv", b"\xff\xfe\x00"),
    "of another version": write("results.csv", b"a,b\n1,2\n"),
    "text for numbers": damage("results.csv", lambda d: d.replace(b"0.", b"x.")),
    "8.786 for 0.8786": damage("results.csv", lambda d: d.replace(b",0.", b",8.", 1)),
}


@pytest.mark.parametrize("case", RESULTS)
def test_damaged_results_are_made_again_from_the_predictions(
    good_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    run = Path(shutil.copytree(good_run, tmp_path / "run"))
    RESULTS[case](run)
    table = Run(run).results
    assert "results.csv is missing or damaged. It is made again" in capsys.readouterr().err
    assert (run / "results.csv").read_bytes() == (good_run / "results.csv").read_bytes()
    pd.testing.assert_frame_equal(table, Run(good_run).results)
    assert capsys.readouterr().err == ""
