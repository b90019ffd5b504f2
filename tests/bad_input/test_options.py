"""Bad options, configuration files and commands: what is wrong is said, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from medtokenbudget.cli import main
from medtokenbudget.data import Manifest
from tests.bad_input.damage import PLAIN, encoded

CONFIGS: dict[str, tuple[bytes, str]] = {
    "not YAML": (b"{a: [", "neither YAML nor JSON"),
    "not UTF-8": (b"\xff\xfe", "neither YAML nor JSON"),
    "a list": (b"- 1\n- 2\n", "has no options"),
    "empty": (b"", "has no options"),
    "an object of Python": (b"a: !!python/object/apply:os.system [x]\n", "neither YAML nor JSON"),
    "an unknown option": (b"budgetz: 3\n", "budgetz"),
    "a wrong type": (b"batch_size: many\n", "batch"),
    "nested": (b"[" * 5_000, "neither YAML nor JSON"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_configuration_file_is_named(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    content, says = CONFIGS[case]
    path = tmp_path / "options.yaml"
    path.write_bytes(content)
    out = str(tmp_path / "p.csv")
    assert main(["predict", str(saved), "x.jpg", "--out", out, "--config", str(path)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "bogus"], "'bogus' is not a device name"),
        (["--device", "cuda:99"], "not available on this machine"),
        (["--budget", "0"], "above 0"),
        (["--budget", "1.5"], "at most 1"),
        (["--budget", "nan"], "is not a number"),
        (["--batch-size", "0"], "at least 1"),
        (["--batch-size", "x"], "batch"),
        (["--selector", "nothing"], "Unknown"),
        (["--unknown", "1"], "unknown"),
        (["--out", "p.xlsx"], "must end in .csv or .parquet"),
    ],
    ids=" ".join,
)
def test_a_bad_option_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (tmp_path / "image.jpg").write_bytes(encoded(PLAIN, "JPEG"))
    out = ["--out", str(tmp_path / "p.csv")]
    assert main(["predict", str(saved), str(tmp_path / "image.jpg"), *out, "--device", "cpu", *words]) == 2
    assert says in capsys.readouterr().err


EVALUATE, ROUTE, CALIBRATE, WEB = (
    "evaluate MODEL PLAIN --out OUT",
    "route IMAGE --model MODEL --out OUT --device cpu",
    "calibrate MODEL PLAIN --out OUT",
    "export MODEL --out OUT",
)
COMMANDS: dict[str, str] = {
    "route NOTHING --model MODEL --out OUT": "NOTHING",
    "route EMPTY --model MODEL --out OUT": "contain no images",
    "route TEXT --model MODEL --out OUT --device cpu": "No image could be read",
    "route IMAGE --model NOTHING --out OUT": "NOTHING",
    "route IMAGE --model MODEL --out TEXT --device cpu": "is a file",
    f"{ROUTE} --masks NOTHING": "NOTHING",
    f"{ROUTE} --masks EMPTY": "No mask in",
    f"{ROUTE} --budget 0": "--budget must be above 0 and at most 1",
    f"{ROUTE} --budget 0.3 --retention 0.9": "exclude each other",
    f"{ROUTE} --coverage 0.9": "--coverage belongs to --retention",
    f"{ROUTE} --retention 0.9": "mtb calibrate",
    f"{ROUTE} --retention 2": "at most 1",
    f"{ROUTE} --table xlsx": "invalid choice 'xlsx'",
    f"{ROUTE} --batch-size 0": "at least 1",
    f"{ROUTE} --selector nothing": "Unknown",
    f"{ROUTE} --device cuda:99": "not available on this machine",
    "evaluate MODEL NOTHING --out OUT": "NOTHING",
    "evaluate MODEL TEXT --out OUT": "TEXT",
    "evaluate NOTHING PLAIN --out OUT": "NOTHING",
    f"{EVALUATE} --store NOTHING": "NOTHING",
    f"{EVALUATE} --classes NOTHING": "NOTHING",
    f"{EVALUATE} --classes TEXT": "TEXT",
    f"{EVALUATE} --budgets 0": "above 0",
    f"{EVALUATE} --part test": "invalid choice 'test'",
    f"{EVALUATE} --selector nothing": "Unknown",
    "calibrate MODEL NOTHING --retention 0.5": "NOTHING",
    "calibrate MODEL TEXT --retention 0.5": "TEXT",
    "calibrate NOTHING PLAIN --retention 0.5": "NOTHING",
    f"{CALIBRATE} --retention 0.5": "mask",
    f"{CALIBRATE} --retention 0": "above 0",
    f"{CALIBRATE} --retention 0.5 --store NOTHING": "NOTHING",
    f"{CALIBRATE} --retention 0.5 --part test": "invalid choice 'test'",
    f"{CALIBRATE} --retention 0.5 --selector nothing": "Unknown",
    f"{WEB} --format web --runtime NOTHING": "NOTHING",
    f"{WEB} --format paper": "invalid choice 'paper'",
    f"{WEB} --format hub --runtime OUT": "--runtime only matters with --format web",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_on_a_model_names_what_is_wrong_and_writes_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    places = {name: tmp_path / name for name in ("IMAGE", "TEXT", "PLAIN", "OUT", "NOTHING", "EMPTY")} | {"MODEL": saved}
    places["IMAGE"], places["PLAIN"] = tmp_path / "image.jpg", tmp_path / "plain.parquet"
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
