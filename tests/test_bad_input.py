"""Bad input of every kind, and the message that a person gets for it: what is wrong, with which file, never a traceback."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from medtokenbudget.app.service import Limits, Service
from medtokenbudget.cli import main
from medtokenbudget.data import Manifest, decode_image, decode_mask
from medtokenbudget.data.masks import mask_of
from medtokenbudget.errors import MedTokenBudgetError
from medtokenbudget.files import sha256_file
from medtokenbudget.tensor_files import load_tensors, save_tensors
from tests.app.server import Server, mask, picture, running_here
from tests.data.test_decode import many_scans
from tests.reporting.fake_run import fake_run
from tests.small_model import small_model

# Images and masks ----------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


PLAIN = Image.effect_noise((64, 48), 60).convert("RGB")
CLEAR = Image.new("RGBA", (8, 8), (255, 0, 0, 100))
FRAMES = {"save_all": True, "append_images": [PLAIN.rotate(90)]}


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def bad_checksum() -> bytes:
    data = bytearray(encoded(PLAIN, "PNG"))
    data[len(data) // 2] ^= 255
    return bytes(data)


def claims(width: int, height: int) -> bytes:
    """A PNG that claims a size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is empty"),
    "text": (lambda: b"hello" * 100, "is not an image"),
    "html": (lambda: b"<html><body>404</body></html>", "is not an image"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
    "pdf": (lambda: b"%PDF-1.7\n" + bytes(100), "is not an image"),
    "zip": (lambda: b"PK\x03\x04" + bytes(100), "is not an image"),
    "only zeros": (lambda: bytes(5000), "is not an image"),
    "half a JPEG": (lambda: cut(encoded(PLAIN, "JPEG")), "damaged or incomplete"),
    "half a PNG": (lambda: cut(encoded(PLAIN, "PNG")), "damaged or incomplete"),
    "half a BMP": (lambda: cut(encoded(PLAIN, "BMP")), "damaged or incomplete"),
    "half a PPM": (lambda: cut(encoded(PLAIN, "PPM")), "damaged or incomplete"),
    "the start of a JPEG": (lambda: encoded(PLAIN, "JPEG")[:4], "is not an image|damaged"),
    "a PNG with a wrong checksum": (bad_checksum, "damaged or incomplete"),
    "a PNG without pixels": (lambda: claims(0, 4), "is not an image|no pixels|damaged"),
    "too many pixels": (lambda: claims(20_000, 20_000), "pixels"),
    "far too many pixels": (lambda: claims(200_000, 200_000), "pixels"),
    "an animated GIF": (lambda: encoded(PLAIN.convert("P"), "GIF", **FRAMES), "several frames or pages"),
    "a TIFF of two pages": (lambda: encoded(PLAIN, "TIFF", **FRAMES), "several frames or pages"),
    "a transparent PNG": (lambda: encoded(CLEAR, "PNG"), "transparent pixels"),
    "a transparent gray PNG": (lambda: encoded(CLEAR.convert("LA"), "PNG"), "transparent pixels"),
    "a transparent WebP": (lambda: encoded(CLEAR, "WEBP"), "transparent pixels"),
    "a palette with a transparent color": (lambda: encoded(Image.new("P", (4, 4)), "PNG", transparency=0), "transparent pixels"),
    "a float TIFF": (lambda: encoded(Image.new("F", (4, 4)), "TIFF"), "pixel format 'F'"),
    "32-bit numbers": (lambda: encoded(Image.new("I", (4, 4), 70_000), "TIFF"), "32-bit pixels"),
    "a JPEG of 3,000 scans": (lambda: many_scans(256, 3000), "scans"),
}


@pytest.mark.parametrize("case", IMAGES)
@pytest.mark.parametrize("read", [decode_image, decode_mask])
def test_a_bad_image_or_mask_is_named_with_its_fault(tmp_path: Path, case: str, read: Callable[[Path], Any]) -> None:
    make, says = IMAGES[case]
    path = tmp_path / "picture.img"
    path.write_bytes(make())
    with pytest.raises(MedTokenBudgetError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_mask_of_another_shape_and_places_without_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    Image.new("L", (50, 10)).save(path)
    for action, says in (
        (lambda: mask_of(PLAIN.size, path), "mask.png has 50 x 10 pixels"),
        (lambda: decode_image(tmp_path), "is a folder"),
        (lambda: decode_image(tmp_path / "nothing"), "does not exist"),
        (lambda: decode_image("a\0b"), "cannot be opened"),
        (lambda: decode_image(tmp_path / ("x" * 300)), "cannot be opened"),
    ):
        with pytest.raises(MedTokenBudgetError, match=says):
            action()


# Models --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    return small_model(root / "weights", baselines=("center",)).save_pretrained(root / "model")


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def edit(*where: str, value: Any = ...) -> Callable[[Path], None]:
    """Set a value of `config.json`, or remove it."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        place = config
        for name in where[:-1]:
            place = place[name]
        if value is ...:
            del place[where[-1]]
        else:
            place[where[-1]] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Change the tensors and put the new hash into `config.json`, as somebody who edits a model on purpose would."""

    def edited(folder: Path) -> None:
        path = folder / "model.safetensors"
        with safe_open(str(path), framework="pt") as stream:
            header = stream.metadata()
        values = load_file(path)
        change(values)
        save_file(values, path, metadata=header)
        edit("files", "model.safetensors", value=sha256_file(path))(folder)

    return edited


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def first(values: dict[str, torch.Tensor]) -> str:
    return min(values)


NESTED = b'{"a":' * 50_000
MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "is not a saved model|has no config.json"),
    "config is text": (write("config.json", b"hello"), r"config\.json is not valid JSON"),
    "config is not UTF-8": (write("config.json", b'{"format": "\xff"}'), r"config\.json is not valid JSON"),
    "config is nested": (write("config.json", NESTED), r"config\.json is nested too deeply"),
    "config is a list": (write("config.json", b"[]"), r"config\.json is not the configuration"),
    "config of something else": (write("config.json", b'{"model_type": "bert"}'), r"config\.json is not the configuration"),
    "newer version": (edit("format_version", value=99), "format version 99"),
    "older version": (edit("format_version", value=1), "format version 1"),
    "version is a list": (edit("format_version", value=[]), "format version"),
    **{f"no {key}": (edit(key), f"has no {key}") for key in ("identity", "backbone", "train", "files", "info")},
    **{f"{key} is text": (edit(key, value="x"), f"{key} must be") for key in ("identity", "backbone", "train", "files", "info")},
    **{f"no identity.{k}": (edit("identity", k), f"no identity.{k}") for k in ("backbone", "classes", "main", "selectors")},
    "classes is text": (edit("identity", "classes", value="MEL"), "identity.classes must be a list of names"),
    "classes are numbers": (edit("identity", "classes", value=[1, 2, 3]), "identity.classes must be a list of names"),
    "a head and no classes": (
        edit("identity", "classes", value=[]),
        "center.head must be null exactly if identity.classes is empty",
    ),
    "classes repeat": (edit("identity", "classes", value=["MEL", "NV", "MEL"]), "names classes more than once: MEL"),
    "main is a number": (edit("identity", "main", value=3), "identity.main must be a method"),
    "main is unknown": (edit("identity", "main", value="other"), "main method 'other'"),
    "methods are a list": (edit("identity", "selectors", value=[]), "identity.selectors must be"),
    "no methods": (edit("identity", "selectors", value={}), "identity.selectors must be"),
    "a method is text": (edit("identity", "selectors", "center", value="x"), "selectors.center must be an object"),
    "a head is text": (edit("identity", "selectors", "center", "head", value="mlp"), "center.head must be an object"),
    "options are a list": (edit("identity", "selectors", "center", "options", value=[]), "center.options must be an object"),
    "a selector is a number": (edit("identity", "selectors", "center", "selector", value=1), "center.selector must be a name"),
    "no tokens": (edit("identity", "backbone", "dim", value=0), "backbone.dim must be a positive number"),
    "width is text": (edit("identity", "backbone", "dim", value="64"), "backbone.dim must be a positive number"),
    "width is true": (edit("identity", "backbone", "dim", value=True), "backbone.dim must be a positive number"),
    "width is huge": (edit("identity", "backbone", "dim", value=10**12), "backbone.dim must be a positive number"),
    "grid of three": (edit("identity", "backbone", "grid", value=[1, 2, 3]), "backbone.grid must be two positive numbers"),
    "grid is a number": (edit("identity", "backbone", "grid", value=10), "backbone.grid must be two positive numbers"),
    "size is a list": (edit("backbone", "image_size", value=[224]), "backbone.image_size must be"),
    "weights is a number": (edit("backbone", "weights", value=7), "backbone.weights must be"),
    "unknown backbone option": (edit("backbone", "color", value="red"), "does not describe a backbone"),
    "unknown training option": (edit("train", "color", value="red"), "training configuration"),
    "training part is a number": (edit("train", "lats", value=3), "training configuration"),
    "a file outside": (edit("files", "../../secret", value="0" * 64), "files must be"),
    "no hashes": (edit("files", value={}), "files must be"),
    "classes edited": (edit("identity", "classes", value=["A", "B", "C"]), "does not match"),
    "card is not UTF-8": (write("README.md", b"\xff\xfe\xff"), r"README\.md is damaged: it is not UTF-8"),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "no heads": (lambda folder: (folder / "heads.safetensors").unlink(), r"heads\.safetensors is missing"),
    "half the tensors": (damage("model.safetensors", cut), r"model\.safetensors is damaged"),
    "a flipped bit": (damage("model.safetensors", flip), r"model\.safetensors is damaged: its hash"),
    "empty tensors file": (write("model.safetensors", b""), r"model\.safetensors is damaged"),
    "tensors of another program": (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "model.safetensors"),
        r"model\.safetensors was not written by medtokenbudget",
    ),
    "header is not JSON": (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "model.safetensors", metadata={"medtokenbudget": "{"}),
        r"model\.safetensors is damaged: its header",
    ),
    "heads and model swapped": (
        lambda folder: shutil.copy(folder / "heads.safetensors", folder / "model.safetensors") and None,
        r"model\.safetensors is damaged: its hash",
    ),
    "integer tensors": (tensors(lambda v: v.update({first(v): v[first(v)].long()})), "numbers of type torch.int64"),
    "NaN in a tensor": (tensors(lambda v: v[first(v)].fill_(float("nan"))), "NaN or infinite"),
    "a tensor is missing": (tensors(lambda v: v.pop(first(v))), "is missing"),
    "a tensor too many": (tensors(lambda v: v.update(extra=torch.ones(1))), "extra is not part of this model"),
    "a tensor of another shape": (tensors(lambda v: v.update({first(v): torch.ones(1, 2, 3)})), "has shape"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_bad_model_is_rejected_with_the_file_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    change, says = MODELS[case]
    change(model)
    (tmp_path / "image.jpg").write_bytes(encoded(PLAIN, "JPEG"))
    assert main(["predict", str(model), str(tmp_path / "image.jpg"), "--out", str(tmp_path / "p.csv"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert re.search(says, said), said
    assert str(tmp_path) in said or "training configuration" in said


# Checkpoints, manifests, runs ----------------------------------------------------------------------------------------


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


# Options -------------------------------------------------------------------------------------------------------------

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)
CONFIGS: dict[str, tuple[bytes, str]] = {
    "aliases that grow": (BOMB.encode(), "uses YAML aliases"),
    "not YAML": (b"{a: [", "neither YAML nor JSON"),
    "not UTF-8": (b"\xff\xfe", "neither YAML nor JSON"),
    "a list": (b"- 1\n- 2\n", "has no options"),
    "empty": (b"", "has no options"),
    "an object of Python": (b"a: !!python/object/apply:os.system [x]\n", "neither YAML nor JSON"),
    "too long": (b"# " + bytes([120]) * 1_100_000, "more than 1,000,000 bytes"),
    "an unknown option": (b"budgetz: 3\n", "budgetz"),
    "a wrong type": (b"batch_size: many\n", "batch"),
    "nested": (b"[" * 500_000, "nested too deeply"),
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
        (["--budget", "nan"], "nan"),
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
    "route TEXT --model MODEL --out OUT --device cpu": "No image could be read",
    "route IMAGE --model NOTHING --out OUT": "NOTHING",
    "route IMAGE --model MODEL --out TEXT --device cpu": "is a file",
    f"{ROUTE} --masks NOTHING": "NOTHING",
    f"{ROUTE} --budget 0.3 --retention 0.9": "exclude each other",
    f"{ROUTE} --coverage 0.9": "belongs to --retention",
    f"{ROUTE} --retention 0.9": "mtb calibrate",
    f"{ROUTE} --retention 2": "at most 1",
    f"{ROUTE} --table xlsx": "Use parquet or csv",
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
    f"{EVALUATE} --part test": "Use auto, val, select, train or all",
    f"{EVALUATE} --selector nothing": "Unknown",
    "calibrate MODEL NOTHING --retention 0.5": "NOTHING",
    "calibrate MODEL TEXT --retention 0.5": "TEXT",
    "calibrate NOTHING PLAIN --retention 0.5": "NOTHING",
    f"{CALIBRATE} --retention 0.5": "mask",
    f"{CALIBRATE} --retention 0": "above 0",
    f"{CALIBRATE} --retention 0.5 --store NOTHING": "NOTHING",
    f"{CALIBRATE} --retention 0.5 --part test": "Use auto, val, select, train or all",
    f"{CALIBRATE} --retention 0.5 --selector nothing": "Unknown",
    f"{WEB} --format web --runtime NOTHING": "NOTHING",
    f"{WEB} --format onnx --serve": "need --format web",
    f"{WEB} --format paper": "Use onnx, web or hub",
    f"{WEB} --format hub --runtime OUT": "need --format web",
    "leaderboard NOTHING --out OUT": "NOTHING",
    "leaderboard MODEL --out OUT": "Make a run",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_on_a_model_names_what_is_wrong_and_writes_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    places = {name: tmp_path / name for name in ("IMAGE", "TEXT", "PLAIN", "OUT", "NOTHING")} | {"MODEL": saved}
    places["IMAGE"], places["PLAIN"] = tmp_path / "image.jpg", tmp_path / "plain.parquet"
    places["IMAGE"].write_bytes(encoded(PLAIN, "JPEG"))
    places["TEXT"].write_text("hello")
    records = [{"image_id": "a", "image": str(places["IMAGE"]), "label": "NV", "split": "val"}]
    Manifest.from_records(records, ("NV", "MEL")).write(places["PLAIN"])
    assert main([str(places.get(word, word)) for word in words.split()]) in (1, 2)
    said = capsys.readouterr().err
    assert COMMANDS[words] in said
    assert "Traceback" not in said
    assert not any(places["OUT"].rglob("*.*")) or "errors.jsonl" in said


# Requests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = Limits(max_bytes=200_000, max_pixels=1_000_000)
    service = Service(small_model(tmp_path_factory.mktemp("server"), baselines=("center", "oracle")), limits)
    with running_here(service) as running:
        yield running


def files(**parts: bytes) -> dict[str, Any]:
    return {"files": parts}


REQUESTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "JSON": ({"json": {"image": "x"}}, 415, "wrong_type"),
    "no type": ({"content": b"x"}, 415, "wrong_type"),
    "no boundary": ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "bad_multipart"),
    "a broken boundary": ({"content": b"xx", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "bad_multipart"),
    "no image": (files(mask=mask()), 422, "no_image"),
    "an unknown file": (files(image=picture(), other=b"x"), 422, "unknown_field"),
    "an unknown field": ({**files(image=picture()), "data": {"size": "3"}}, 422, "unknown_field"),
    "image as text": ({"files": {"mask": mask()}, "data": {"image": "x"}}, 422, "not_a_file"),
    "too many bytes": (files(image=bytes(300_001)), 413, "too_many_bytes"),
    "too many pixels": (files(image=claims(2000, 2000)), 413, "too_many_pixels"),
    "empty image": (files(image=b""), 422, "empty"),
    "text as image": (files(image=b"hello" * 99), 415, "not_an_image"),
    "half an image": (files(image=cut(picture(600, 400))), 422, "damaged"),
    "transparent image": (files(image=encoded(CLEAR, "PNG")), 422, "alpha"),
    "two frames": (files(image=encoded(PLAIN.convert("P"), "GIF", **FRAMES)), 422, "frames"),
    "mask of another shape": (files(image=picture(), mask=mask(90, 120)), 422, "bad_request"),
    "text as mask": (files(image=picture(), mask=b"hello" * 99), 415, "not_an_image"),
    "mask of zeros and ones": (files(image=picture(), mask=encoded(Image.new("L", (120, 90), 1), "PNG")), 422, "bad_request"),
    "budget is text": ({**files(image=picture()), "data": {"budgets": "many"}}, 422, "bad_budget"),
    "budget above 1": ({**files(image=picture()), "data": {"budgets": "1.5"}}, 422, "bad_request"),
    "budget is NaN": ({**files(image=picture()), "data": {"budgets": "nan"}}, 422, "bad_request"),
    "too many budgets": ({**files(image=picture()), "data": {"budgets": ",".join(["0.5"] * 200)}}, 422, "bad_request"),
    "unknown method": ({**files(image=picture()), "data": {"selectors": "nothing"}}, 422, "bad_request"),
    "a method that needs a mask": ({**files(image=picture()), "data": {"selectors": "oracle"}}, 422, "bad_request"),
    "preview is a number": ({**files(image=picture()), "data": {"preview": "1"}}, 422, "bad_preview"),
    "another origin": ({**files(image=picture()), "headers": {"Origin": "https://evil.example"}}, 403, "cross_origin"),
    "an origin that is none": ({**files(image=picture()), "headers": {"Origin": "http://["}}, 403, "cross_origin"),
    "another host": ({**files(image=picture()), "headers": {"Host": "evil.example"}}, 421, "wrong_host"),
    "a host that is none": ({**files(image=picture()), "headers": {"Host": "["}}, 421, "wrong_host"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_bad_request_gets_its_status_and_code(server: Server, case: str) -> None:
    request, status, code = REQUESTS[case]
    response = httpx.post(f"{server.url}/v1/route", timeout=60, **request)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert len(response.json()["error"]["message"]) > 10


# Names that are code -------------------------------------------------------------------------------------------------


def test_names_that_spreadsheets_and_pages_would_run_are_only_names(tmp_path: Path) -> None:
    from medtokenbudget.escaping import csv_cell, from_csv_cell
    from medtokenbudget.experiments.results import RESULT_COLUMNS, read_results, write_results
    from medtokenbudget.reporting.table import Table

    evil = ("=HYPERLINK(1)", "+1", "-1+1", "@SUM(A1)", "\t=1")
    assert [from_csv_cell(csv_cell(name)) for name in (*evil, "NV", "'x")] == [*evil, "NV", "'x"]
    row: dict[str, Any] = dict.fromkeys(RESULT_COLUMNS, -0.5)
    frame = pd.DataFrame([{**row, "study": "s", "dataset": name, "view": "as-is", "method": "center"} for name in evil])
    write_results(tmp_path / "results.csv", frame)
    text = (tmp_path / "results.csv").read_text()
    assert ",'=HYPERLINK" in text
    assert ",-0.5" in text, "numbers stay numbers"
    assert read_results(tmp_path / "results.csv")["dataset"].tolist() == list(evil)
    name = "<script>alert(1)</script>[x](javascript:y)|z"
    Table("t", name, ["=class", "n"], [[name, "1"]], pd.DataFrame({"=class": [evil[0]], "n": [np.float64(-1)]})).write(tmp_path)
    assert "<script" not in (tmp_path / "t.md").read_text()
    assert "](javascript" not in (tmp_path / "t.md").read_text()
    assert (tmp_path / "t.csv").read_text() == "'=class,n\n'=HYPERLINK(1),-1\n"
