"""The saved folder: `config.json`, `model.safetensors`, `README.md` and, if the model has several methods, `heads.safetensors`.

What must agree is stored twice, in the configuration and in the headers of the tensor files. The configuration carries a checksum
of itself and the hashes of the tensor files. An edited, mixed-up, damaged or foreign file is therefore rejected by name before
anything is built from it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from safetensors.torch import save
from torch import Tensor

from medtokenbudget import __version__
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.escaping import markdown_text
from medtokenbudget.files import dotted, read_json, sha256_file, sha256_json, unsealed, write_safetensors, write_sealed, write_text
from medtokenbudget.model.schema import check_config

FORMAT = "medtokenbudget-model"
FORMAT_VERSION = 3
CONFIG, TENSORS, HEADS, CARD = "config.json", "model.safetensors", "heads.safetensors", "README.md"
ROUTER = "router"
"""Folder of the router inside the folder of a model that is routed early."""


def write_folder(
    folder: Path, identity: dict[str, Any], settings: dict[str, Any], tensors: dict[str, dict[str, Tensor]], card: str
) -> None:
    """Write the folder; `tensors` maps a file name to its tensors, `identity` is what every file must agree on."""
    files = {}
    for name, values in tensors.items():
        whole = {key: value.detach().cpu().contiguous() for key, value in sorted(values.items())}
        # One key only: safetensors writes several in an order that changes from call to call.
        header = {"medtokenbudget": json.dumps(identity, sort_keys=True)}
        write_safetensors(folder / name, save(whole, header))
        files[name] = sha256_file(folder / name)
    if HEADS not in tensors:
        (folder / HEADS).unlink(missing_ok=True)
    write_text(folder / CARD, card or _short_card(identity))
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": __version__, "identity": identity, "files": files}
    # The configuration is written last: a folder left behind by a crash has none and is rejected.
    write_sealed(folder / CONFIG, {**config, **settings})


def _short_card(identity: dict[str, Any]) -> str:
    """The card of a model that was not saved from a run and so has no results to show."""
    return (
        "# MedTokenBudget model\n\nResearch software, not a medical device. This model was not evaluated in a run.\n\n"
        f"- backbone: {identity['backbone']['name']}, weights sha256 {identity['backbone']['weights']}\n"
        f"- classes: {', '.join(map(markdown_text, identity['classes'])) or 'none: a router without a head'}\n"
        f"- main method: {identity['main']}\n"
        f"- methods: {', '.join(identity['selectors'])}\n"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the `config.json` of a saved model."""
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder} is not a saved model: it has no {CONFIG}. The model of a run is in RUN/model.")
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RequestError(f"{path} is not the configuration of a MedTokenBudget model. Copy the model folder again.")
    _check_version(path, config)
    config = unsealed(path, config, "Copy the model folder again, or train the model again.")
    check_config(path, config)
    return config


def _check_version(path: Path, config: dict[str, Any]) -> None:
    found = config.get("format_version")
    if found == FORMAT_VERSION:
        return
    newer = isinstance(found, int) and found > FORMAT_VERSION
    advice = (
        f"Install medtokenbudget {config.get('version')} or newer."
        if newer
        else "Train the model again: `mtb train MANIFEST --store STORE --out NEW_RUN`."
    )
    raise RequestError(f"{path} has model format version {found}, but this program reads version {FORMAT_VERSION}. {advice}")


def read_tensors(folder: Path, name: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of one file; a file that is missing, damaged, or part of another model is rejected by name."""
    path = folder / name
    if not path.is_file():
        raise RequestError(f"{path} is missing. Copy the whole model folder again.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as reader:
            header = reader.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise RequestError(f"{path} is damaged or not a safetensors file ({error}). Copy the model folder again.") from None
    if "medtokenbudget" not in header:
        raise RequestError(f"{path} was not written by medtokenbudget. Replace it with the {name} that belongs to this model.")
    try:
        identity = json.loads(header["medtokenbudget"])
        if not isinstance(identity, dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise RequestError(f"{path} is damaged: its header cannot be read. Copy the model folder again.") from None
    check_identity(f"{path} and {CONFIG}", identity, config["identity"])
    if sha256_file(path) != config["files"].get(name):
        raise RequestError(f"{path} is damaged: its hash is not the one in {CONFIG}. Copy the model folder again.")
    return safetensors.torch.load_file(str(path))


def check_identity(what: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise an error that shows the difference if backbone, preprocessing, classes or methods do not agree."""
    if expected == found:
        return
    raise MismatchError.between(
        what,
        dotted(expected),
        dotted(found),
        "Use the files as they were saved. To change classes, methods or backbone, train again.",
    )


def read_card(folder: Path) -> str:
    """The text of `README.md`; empty if there is none."""
    path = folder / CARD
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError:
        raise RequestError(f"{path} is damaged: it is not UTF-8 text. Copy the model folder again, or delete this file.") from None


def fingerprint(identity: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> str:
    """One hash of a whole model: what its files agree on, and every number in them."""
    digest = hashlib.sha256(sha256_json(identity).encode())
    for file in sorted(tensors):
        for name, value in sorted(tensors[file].items()):
            digest.update(f"{file}/{name}{list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
