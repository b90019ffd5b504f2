"""The types in a model's `config.json`. Its own file because the file may come from anywhere: every value is checked before use."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError

Check = Callable[[Any], bool]
TENSOR_FILES = ("model.safetensors", "heads.safetensors")


def _is(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


def _count(value: Any) -> bool:
    return _is(int)(value) and 0 < value <= 1_000_000


def _finite(value: Any) -> bool:
    return _is(int, float)(value) and math.isfinite(value)


def _share(value: Any) -> bool:
    return _finite(value) and 0 < value < 1


def _names(value: Any) -> bool:
    return _is(list)(value) and all(isinstance(name, str) and name for name in value)


def _grid(value: Any) -> bool:
    return _is(list)(value) and len(value) == 2 and all(map(_count, value))


def _files(value: Any) -> bool:
    return _is(dict)(value) and TENSOR_FILES[0] in value and all(n in TENSOR_FILES and _is(str)(h) for n, h in value.items())


_TOP: dict[str, tuple[Check, str]] = {
    "identity": (_is(dict), "an object"),
    "backbone": (_is(dict), "an object"),
    "train": (_is(dict), "an object"),
    "files": (_files, "the hashes of model.safetensors and, if there are other methods, heads.safetensors"),
    "info": (_is(dict), "an object"),
}
_IDENTITY: dict[str, tuple[Check, str]] = {
    "backbone": (_is(dict), "an object"),
    "classes": (_names, "a list of names"),
    "main": (_is(str), "a method"),
    "selectors": (lambda value: _is(dict)(value) and bool(value), "an object with at least one method"),
}
_FINGERPRINT: dict[str, tuple[Check, str]] = {
    "name": (_is(str), "a name"),
    "weights": (_is(str), "a hash"),
    "dim": (_count, "a positive number"),
    "image_size": (_count, "a positive number"),
    "grid": (_grid, "two positive numbers"),
}
_BACKBONE: dict[str, tuple[Check, str]] = {
    "name": (_is(str), "a name"),
    "weights": (_is(str, type(None)), "a path or null"),
    "image_size": (_count, "a positive number"),
}
_METHOD: dict[str, tuple[Check, str]] = {
    "selector": (_is(str), "a name"),
    "options": (_is(dict), "an object"),
    "head": (_is(dict, type(None)), "an object, or null for a router without a head"),
}
_GUARANTEE: dict[str, tuple[Check, str]] = {
    "retention": (_share, "a number between 0 and 1"),
    "coverage": (lambda value: value is None or _share(value), "a number between 0 and 1, or null"),
    "cap": (lambda value: value is None or value == 1 or _share(value), "a number in (0, 1], or null"),
    "threshold": (_finite, "a finite number"),
    "minimum": (_count, "a positive number"),
    "most": (_count, "a positive number"),
    "selector": (_is(str), "a method"),
    "bound": (_finite, "a finite number"),
    "kept": (_finite, "a finite number"),
    "tokens": (_finite, "a finite number"),
    "images": (_count, "a positive number"),
    "groups": (_count, "a positive number"),
    "dataset": (_is(str), "a name"),
    "data": (_is(str), "a hash"),
    "model": (_is(str), "a hash"),
}
_HEAD: dict[str, tuple[Check, str]] = {"name": (_is(str), "a name"), "options": (_is(dict), "an object")}


def check_config(path: Path, config: dict[str, Any]) -> None:
    """Check the types of everything that a model is built from.

    Raises:
        RequestError: A value is missing or of the wrong type; the message names the file and the value.
    """
    _check(path, config, _TOP)
    identity = config["identity"]
    _check(path, identity, _IDENTITY, "identity.")
    _check(path, identity["backbone"], _FINGERPRINT, "identity.backbone.")
    _check(path, config["backbone"], _BACKBONE, "backbone.")
    for method, described in identity["selectors"].items():
        where = f"identity.selectors.{method}"
        if not isinstance(described, dict):
            raise _wrong(path, where, "an object")
        _check(path, described, _METHOD, f"{where}.")
        if described["head"] is not None:
            _check(path, described["head"], _HEAD, f"{where}.head.")
        if (described["head"] is None) is bool(identity["classes"]):
            raise _wrong(path, f"{where}.head", "null exactly if identity.classes is empty")
    _check_guarantees(path, config.get("guarantees", []), identity)
    if len(set(identity["classes"])) < len(identity["classes"]):
        repeated = sorted({name for name in identity["classes"] if identity["classes"].count(name) > 1})
        raise RequestError(f"{path} names classes more than once: {', '.join(repeated)}. Train the model again with unique names.")
    if identity["main"] not in identity["selectors"]:
        raise RequestError(f"{path} is damaged: the main method '{identity['main']}' is not one of its methods. Save it again.")


def _check_guarantees(path: Path, values: Any, identity: dict[str, Any]) -> None:
    """Models that were never calibrated have no guarantees."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise _wrong(path, "guarantees", "a list of objects")
    h, w = identity["backbone"]["grid"]
    for number, value in enumerate(values):
        where = f"guarantees.{number}."
        _check(path, value, _GUARANTEE, where)
        if value["selector"] not in identity["selectors"]:
            raise _wrong(path, f"{where}selector", "one of the model's methods")
        if not value["minimum"] <= value["most"] <= h * w:
            raise _wrong(path, f"{where}most", f"between {value['minimum']} and {h * w} patches")


def _check(path: Path, values: dict[str, Any], checks: dict[str, tuple[Check, str]], prefix: str = "") -> None:
    missing = [f"{prefix}{name}" for name in checks if name not in values]
    if missing:
        raise RequestError(f"{path} is damaged: it has no {', '.join(missing)}. Save the model again.")
    for name, (valid, expected) in checks.items():
        if not valid(values[name]):
            raise _wrong(path, f"{prefix}{name}", expected)


def _wrong(path: Path, name: str, expected: str) -> RequestError:
    return RequestError(f"{path} is damaged: {name} must be {expected}. Save the model again.")
