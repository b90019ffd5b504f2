"""The saved folder: `config.json`, `model.safetensors`, `README.md` and, with baselines, `heads.safetensors`.

What must agree is written twice, in the configuration and in the tensor files' own headers, and the tensor files are hashed: an
edited, mixed-up, damaged or foreign file is refused by name before anything is built from it.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from medtokenbudget import __version__
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.files import dotted, read_json, sha256_file, sha256_json, write_json, write_safetensors, write_text

FORMAT = "medtokenbudget-model"
FORMAT_VERSION = 1
CONFIG, TENSORS, HEADS, CARD = "config.json", "model.safetensors", "heads.safetensors", "README.md"
KEYS = ("identity", "backbone", "train", "files", "info")
IDENTITY_KEYS = ("backbone", "classes", "selectors")


def write_folder(
    folder: Path, identity: dict[str, Any], settings: dict[str, Any], tensors: dict[str, dict[str, Tensor]], card: str
) -> None:
    """Write the folder; `tensors` maps a file name to its tensors, `identity` is what every file must agree on."""
    files = {}
    for name, values in tensors.items():
        whole = {key: value.detach().cpu().contiguous() for key, value in sorted(values.items())}
        # One key only: safetensors writes several in an order that changes from call to call.
        header = {"medtokenbudget": json.dumps(identity, sort_keys=True)}
        write_safetensors(folder / name, partial(safetensors.torch.save_file, whole, metadata=header))
        files[name] = sha256_file(folder / name)
    if HEADS not in tensors:
        (folder / HEADS).unlink(missing_ok=True)
    write_text(folder / CARD, card or _short_card(identity))
    config = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": __version__, "identity": identity, "files": files}
    # The configuration comes last: a folder that a crash cut short has none, and is refused.
    write_json(folder / CONFIG, {**config, **settings})


def _short_card(identity: dict[str, Any]) -> str:
    """For a model that comes from no run, and so has no results to show."""
    return (
        "# MedTokenBudget model\n\nResearch software, not a medical device. Not evaluated: no run stands behind this file.\n\n"
        f"- backbone: {identity['backbone']['name']}, weights sha256 {identity['backbone']['weights']}\n"
        f"- classes: {', '.join(identity['classes'])}\n- selectors: {', '.join(identity['selectors'])}\n"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The checked `config.json` of a saved model."""
    path = folder / CONFIG
    if not path.is_file():
        raise RequestError(f"{folder} is not a saved model: it has no {CONFIG}. A run keeps its model in RUN/model.")
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise RequestError(f"{path} is not the configuration of a MedTokenBudget model.")
    if config.get("format_version") != FORMAT_VERSION:
        raise RequestError(
            f"{path} has format version {config.get('format_version')!r}, this program reads {FORMAT_VERSION}. "
            f"It was written by medtokenbudget {config.get('version')}: install that version."
        )
    missing = [key for key in KEYS if key not in config] + [key for key in IDENTITY_KEYS if key not in config.get("identity", {})]
    if missing:
        raise RequestError(f"{path} is damaged: it lacks {', '.join(missing)}. Save the model again.")
    return config


def read_tensors(folder: Path, name: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of one file of the folder, refused by name if the file is absent, damaged, or belongs to another model."""
    path = folder / name
    if not path.is_file():
        raise RequestError(f"{path} is missing. Copy the whole folder of the model again.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as reader:
            header = reader.metadata() or {}
    except (safetensors.SafetensorError, OSError) as error:
        raise RequestError(f"{path} is damaged or not a safetensors file ({error}). Copy the model again.") from None
    if "medtokenbudget" not in header:
        raise RequestError(f"{path} was not written by medtokenbudget. Put the model's own {name} in its place.")
    check_identity(f"{path} and {CONFIG}", json.loads(header["medtokenbudget"]), config["identity"])
    if sha256_file(path) != config["files"].get(name):
        raise RequestError(f"{path} is damaged: its content is not what {CONFIG} says. Copy the model again.")
    return safetensors.torch.load_file(str(path))


def check_identity(what: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse another backbone, preprocessing, class list or selector, showing what differs."""
    if expected == found:
        return
    raise MismatchError.between(
        what,
        dotted(expected),
        dotted(found),
        "Use the files as they were saved; a changed class list or backbone needs a new training.",
    )


def read_card(folder: Path) -> str:
    path = folder / CARD
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def fingerprint(identity: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> str:
    """One hash for a whole model: what its files agree on, and every number in them."""
    digest = hashlib.sha256(sha256_json(identity).encode())
    for file in sorted(tensors):
        for name, value in sorted(tensors[file].items()):
            digest.update(f"{file}/{name}{list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
