"""Backbones that are folders: the ones in this package, by name, and any folder that `mtb distill` wrote, by path.

A folder holds `config.json` (how to build the model with timm, its preprocessing, its license), `weights.safetensors` and a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError
from medtokenbudget.files import read_json, write_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"

PACKAGED: dict[str, Path] = {"embedded": Path(__file__).parent / "embedded"}
"""Names of the backbones that are in the package, and where they lie."""


@dataclass(frozen=True)
class Recipe:
    """How to build a backbone that is not in timm's own list."""

    architecture: str
    """The timm model that is the starting point."""
    arguments: dict[str, Any]
    """What is changed on it (`timm.create_model` keywords)."""
    preprocessing: dict[str, Any]
    """Mean, standard deviation and interpolation."""
    license: str
    """License of the weights."""
    weights: Path | None = None
    """Where the weights lie."""

    def write(self, folder: Path) -> None:
        values = {
            "architecture": self.architecture,
            "arguments": self.arguments,
            "preprocessing": self.preprocessing,
            "license": self.license,
        }
        write_json(folder / CONFIG_FILE, values)


def find(name: str) -> Recipe | None:
    """The recipe of a packaged name or of a folder; None for a name that timm may know."""
    folder = PACKAGED.get(name, Path(name))
    if name not in PACKAGED and not (folder / CONFIG_FILE).is_file():
        return None
    values = read_json(folder / CONFIG_FILE)
    try:
        return Recipe(**values, weights=folder / WEIGHTS_FILE)
    except TypeError as error:
        raise RequestError(f"{folder / CONFIG_FILE} does not describe a backbone: {error}.") from None
