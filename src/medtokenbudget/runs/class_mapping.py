"""From the classes of other data to those of a model: by name, or by a mapping file where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import RequestError
from medtokenbudget.files import read_json


def read_mapping(path: Path | str) -> dict[str, str | None]:
    """Read a mapping file: a JSON object from a class of the data to a class of the model, or null to leave the class out."""
    values: Any = read_json(Path(path))
    if not isinstance(values, dict) or not all(value is None or isinstance(value, str) for value in values.values()):
        raise RequestError(f'{path} must be a JSON object from class names to class names or null, such as {{"nevus": "NV"}}.')
    return values


def in_classes_of(manifest: Manifest, classes: Sequence[str], mapping: Mapping[str, str | None] | None = None) -> Manifest:
    """The manifest with the labels of a model.

    Args:
        manifest: The images, with labels of their own or without.
        classes: Classes of the model; empty for a router without a head, for which labels do not matter.
        mapping: Class of the data to class of the model, None to leave its images out of the classification.

    Returns:
        The same images with labels in `classes`; an image that is left out has none.

    Raises:
        RequestError: A label has no counterpart, the mapping names classes that do not exist, or the model has none.
    """
    found = list(dict.fromkeys(label for label in manifest.rows["label"] if label is not None))
    given = dict(mapping or {})
    if not classes:
        if given:
            raise RequestError("The model is a router without classes, so there is nothing to map them to. Leave out --classes.")
        return manifest.without_labels()
    _check_mapping(given, manifest.classes, classes)
    unknown = [name for name in found if name not in given and name not in classes]
    if unknown:
        example = ", ".join(f'"{name}": null' for name in unknown[:3])
        raise RequestError(
            f"The model does not know these classes of the data: {listed(unknown)}. It knows {', '.join(classes)}. Write a "
            f"JSON file that maps each of them to a class of the model, or to null to leave it out, "
            f"such as {{{example}}}, for --classes FILE."
        )
    labels = [None if label is None else given.get(label, label) for label in manifest.rows["label"]]
    return replace(manifest, rows=manifest.rows.assign(label=pd.Series(labels, dtype=object)), classes=tuple(classes))


def _check_mapping(mapping: Mapping[str, str | None], theirs: Sequence[str], ours: Sequence[str]) -> None:
    strangers = [name for name in mapping if name not in theirs]
    targets = sorted({name for name in mapping.values() if name is not None and name not in ours})
    if strangers:
        raise RequestError(f"The mapping names {listed(strangers)}, but the classes of the data are {', '.join(theirs) or 'none'}.")
    if targets:
        raise RequestError(f"The mapping leads to {listed(targets)}, but the classes of the model are {', '.join(ours)}.")
