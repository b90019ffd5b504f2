"""Bad models: rejected with the file named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from medtokenbudget.cli import main
from medtokenbudget.files import sha256_file
from tests.bad_input.damage import NESTED, PLAIN, cut, damage, edit_json, encoded, flip, write


def edit(*where: str, value: Any = ...) -> Callable[[Path], None]:
    """Set a value of `config.json`, or remove it."""

    def change(place: dict[str, Any]) -> None:
        for name in where[:-1]:
            place = place[name]
        if value is ...:
            del place[where[-1]]
        else:
            place[where[-1]] = value

    return lambda folder: edit_json(folder / "config.json", change)


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


def first(values: dict[str, torch.Tensor]) -> str:
    return min(values)


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
    **{f"no {key}": (edit(key), f"{key} must be an object") for key in ("identity", "backbone", "train", "files", "info")},
    **{f"{key} is text": (edit(key, value="x"), f"{key} must be") for key in ("identity", "backbone", "train", "files", "info")},
    **{f"no identity.{k}": (edit("identity", k), "does not match") for k in ("backbone", "classes", "main", "selectors")},
    "classes is text": (edit("identity", "classes", value="MEL"), "classes: expected .*, found 'MEL'"),
    "main is unknown": (edit("identity", "main", value="other"), "main: expected .*, found 'other'"),
    "a method is text": (edit("identity", "selectors", "center", value="x"), "selectors.center"),
    "width is huge": (edit("identity", "backbone", "dim", value=10**12), "backbone.dim: expected 64, found 10{12}"),
    "size is a list": (edit("backbone", "image_size", value=[224]), "does not describe a backbone"),
    "weights is a number": (edit("backbone", "weights", value=7), "does not describe a backbone"),
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
    assert main(f"predict {tmp_path}/image.jpg --model {model} --out {tmp_path}/p.csv --device cpu".split()) == 2
    said = capsys.readouterr().err
    assert re.search(says, said), said
    assert str(tmp_path) in said or "training configuration" in said
