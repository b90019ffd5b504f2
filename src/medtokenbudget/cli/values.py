"""How the text after an option becomes a value, and what the message says when it does not.

A `Kind` is made from the type annotation of an option, so that commands and configuration dataclasses write plain types.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from medtokenbudget.config import BUDGET, Range


@dataclass(frozen=True)
class Kind:
    """One kind of value: how it is read, what the help calls it and what a message says is allowed.

    `read` raises ValueError for a text that it does not accept. An empty `metavar` means the name of the option.
    """

    read: Callable[[str], Any]
    metavar: str
    allowed: str
    choices: tuple[str, ...] = ()

    def __call__(self, text: str) -> Any:
        try:
            return self.read(text)
        except ValueError as error:
            hint = str(error) if isinstance(error, _Hint) else ""
            raise ValueError(f"cannot be '{text}'. Use {self.allowed}.{hint}") from None


class _Hint(ValueError):
    """A rejected value with a hint for the message."""


def kind_of(annotation: Any) -> tuple[Kind, bool]:
    """The kind of a type annotation, and whether the option takes several values.

    Args:
        annotation: A `Kind`, `str`, `int`, `float`, `bool`, `Path`, a `Literal` of strings, a number with a `config.Range`, a tuple
            or list of one of these, or any of them with `| None`.

    Returns:
        The kind of one value, and True if there may be several.
    """
    if isinstance(annotation, Kind):
        return annotation, False
    if annotation in _SIMPLE:
        return _SIMPLE[annotation], False
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = next((argument for argument in arguments if isinstance(argument, Range)), None)
        if limits is None:
            return kind_of(arguments[0])
        return budget if limits is BUDGET else within(kind_of(arguments[0])[0], limits), False
    if origin is Literal:
        return choice(arguments), False
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return kind_of(inner)
    if origin in (tuple, list):
        return kind_of(arguments[0])[0], True
    raise TypeError(f"options cannot have the type {annotation!r}")


def choice(names: tuple[str, ...] | list[str]) -> Kind:
    """One of several names."""

    def read(text: str) -> str:
        if text not in names:
            close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
            raise _Hint(f" Did you mean '{close[0]}'?" if close else "")
        return text

    return Kind(read, "{" + ",".join(names) + "}", _either(list(names)), tuple(names))


def within(kind: Kind, limits: Range) -> Kind:
    """A number of a range."""

    def read(text: str) -> Any:
        value = kind.read(text)
        if value not in limits:
            raise ValueError
        return value

    return Kind(read, kind.metavar, f"{kind.allowed} that is {limits}")


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _number(text: str) -> float:
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if value - value != 0:  # NaN or infinity
        raise ValueError
    return value


def _budget(text: str) -> float:
    value = _number(text)
    if 1 < value <= 100 and not text.endswith("%"):
        raise _Hint(f" Did you mean {text}%?")
    if not 0 < value <= 1:
        raise ValueError
    return value


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no"):
        raise ValueError
    return text.lower() in ("true", "yes")


def _path(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(text)


budget = Kind(_budget, "BUDGET", "a share of the patches above 0 and at most 1, such as 0.3 or 30%")
share = Kind(_budget, "SHARE", "a share above 0 and at most 1, such as 0.95 or 95%")
_SIMPLE: dict[Any, Kind] = {
    None: Kind(str, "", "text"),
    str: Kind(str, "", "text"),
    int: Kind(int, "N", "a whole number"),
    float: Kind(_number, "X", "a number"),
    bool: Kind(_flag, "{true,false}", "true or false", ("true", "false")),
    Path: Kind(_path, "PATH", "a path"),
}
