"""Bad options of commands on a model: what is wrong is said, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest
from tests.bad_input.damage import PLAIN, encoded

PREDICT, ROUTE = "predict IMAGE --model MODEL --out TABLE --device cpu", "route IMAGE --model MODEL --out OUT --device cpu"
EVALUATE, CALIBRATE, WEB = (
    "evaluate PLAIN --model MODEL --out OUT",
    "calibrate PLAIN --model MODEL --out OUT",
    "export MODEL --out OUT",
)
COMMANDS: dict[str, str] = {
    "predict IMAGE --model MODEL --out OUT": "must end in .csv or .parquet",
    f"{PREDICT} --device bogus": "'bogus' is not a device name",
    f"{PREDICT} --selector nothing": "Unknown",
    f"{PREDICT} --unknown 1": "unknown",
    "route NOTHING --model MODEL --out OUT": "NOTHING",
    "route EMPTY --model MODEL --out OUT": "contain no images",
    "route TEXT --model MODEL --out OUT --device cpu": "No image could be read",
    "route IMAGE --model NOTHING --out OUT": "NOTHING",
    "route IMAGE --model MODEL --out TEXT --device cpu": "is a file",
    f"{ROUTE} --masks NOTHING": "NOTHING",
    f"{ROUTE} --masks EMPTY": "No mask in",
    f"{ROUTE} --budget 0.3 --retention 0.9": "exclude each other",
    f"{ROUTE} --coverage 0.9": "--coverage belongs to --retention",
    f"{ROUTE} --retention 0.9": "mtb calibrate",
    f"{ROUTE} --retention 2": "at most 1",
    f"{ROUTE} --selector nothing": "Unknown",
    f"{ROUTE} --device cuda:99": "not available on this machine",
    "evaluate NOTHING --model MODEL --out OUT": "NOTHING",
    "evaluate TEXT --model MODEL --out OUT": "TEXT",
    "evaluate PLAIN --model NOTHING --out OUT": "NOTHING",
    f"{EVALUATE} --store NOTHING": "NOTHING",
    f"{EVALUATE} --classes NOTHING": "NOTHING",
    f"{EVALUATE} --classes TEXT": "TEXT",
    f"{EVALUATE} --budgets 0": "above 0",
    f"{EVALUATE} --selector nothing": "Unknown",
    "calibrate MODEL NOTHING --retention 0.5": "NOTHING",
    "calibrate MODEL TEXT --retention 0.5": "TEXT",
    "calibrate PLAIN --model NOTHING --retention 0.5": "NOTHING",
    f"{CALIBRATE} --retention 0.5": "mask",
    f"{CALIBRATE} --retention 0": "above 0",
    f"{CALIBRATE} --retention 0.5 --store NOTHING": "NOTHING",
    f"{CALIBRATE} --retention 0.5 --part test": "invalid choice 'test'",
    f"{CALIBRATE} --retention 0.5 --selector nothing": "Unknown",
    f"{WEB} --format web --runtime NOTHING": "NOTHING",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_on_a_model_names_what_is_wrong_and_writes_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    places = {name: tmp_path / name for name in ("TEXT", "OUT", "NOTHING", "EMPTY")} | {"MODEL": saved}
    places |= {"IMAGE": tmp_path / "image.jpg", "PLAIN": tmp_path / "plain.parquet", "TABLE": tmp_path / "OUT" / "p.csv"}
    places["IMAGE"].write_bytes(encoded(PLAIN, "JPEG"))
    places["TEXT"].write_text("hello")
    places["EMPTY"].mkdir()
    records = [{"image_id": "a", "image": str(places["IMAGE"]), "label": "NV", "split": "val"}]
    Manifest.from_records(records, ("NV", "MEL")).write(places["PLAIN"])
    assert main([str(places.get(word, word)) for word in words.split()]) in (1, 2)
    said = capsys.readouterr().err
    assert COMMANDS[words] in said
    assert "Traceback" not in said
    assert not any(places["OUT"].rglob("*.*")) or "errors.jsonl" in said
