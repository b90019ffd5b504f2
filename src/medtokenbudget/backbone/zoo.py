"""Backbones that are folders: those in this package, by name, and those written by `tools/distill.py`, by path.

A folder contains `config.json` (how to build the model with timm, its preprocessing and license, the hash of the weights),
`weights.safetensors` and a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError
from medtokenbudget.files import read_sealed, sha256_file, write_sealed

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"

PACKAGED: dict[str, Path] = {"embedded": Path(__file__).parent / "embedded"}
"""Names and folders of the backbones in this package."""
_AGAIN = "Copy the folder of the backbone again; if it is part of this package, install medtokenbudget again."


@dataclass(frozen=True)
class Recipe:
    """How to build a backbone that timm does not know by name."""

    architecture: str
    """Name of the timm model to start from."""
    arguments: dict[str, Any]
    """Keywords of `timm.create_model` that change it."""
    preprocessing: dict[str, Any]
    """Mean, standard deviation and interpolation."""
    license: str
    """License of the weights."""
    sha256: str | None = None
    """Hash of the file of the weights."""
    weights: Path | None = None
    """Path of the weights."""

    def write(self, folder: Path) -> None:
        """Write `config.json` next to the weights, which are in the folder already."""
        values = {
            "architecture": self.architecture,
            "arguments": self.arguments,
            "preprocessing": self.preprocessing,
            "license": self.license,
            "sha256": sha256_file(folder / WEIGHTS_FILE),
        }
        write_sealed(folder / CONFIG_FILE, values)


def find(name: str) -> Recipe | None:
    """The recipe of a packaged backbone or of a folder; None for a name that timm may know."""
    folder = PACKAGED.get(name, Path(name))
    if name not in PACKAGED and not (folder / CONFIG_FILE).is_file():
        return None
    values = read_sealed(folder / CONFIG_FILE, _AGAIN)
    try:
        return Recipe(**values, weights=folder / WEIGHTS_FILE)
    except TypeError as error:
        raise RequestError(f"{folder / CONFIG_FILE} does not describe a backbone: {error}.") from None


def check_weights(recipe: Recipe, path: Path, sha256: str) -> None:
    """Raise a RequestError if the weights of a recipe are not those that it was written with."""
    if path == recipe.weights and sha256 != recipe.sha256:
        raise RequestError(f"{path} is damaged: its hash is not the one in {CONFIG_FILE}. {_AGAIN}")
