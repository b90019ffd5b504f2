"""Options from a YAML or JSON file (`--config`), and options written as one (`--print-config`)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medtokenbudget.errors import RequestError, first_line
from medtokenbudget.files import dotted

MAX_BYTES = 1_000_000
MAX_DEPTH = 20


def named(words: Sequence[str]) -> str | None:
    """The file after `--config`, if there is one."""
    return value_of("--config", words)


def value_of(option: str, words: Sequence[str]) -> str | None:
    """The value of an option before anything is parsed."""
    for index, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.split("=", 1)[1]
        if word == option and index + 1 < len(words):
            return words[index + 1]
    return None


def read(file: str) -> dict[str, Any]:
    """The options in a file, those of groups with a dot: `lats: {hidden: 8}` gives `lats.hidden`."""
    import yaml

    try:
        if Path(file).stat().st_size > MAX_BYTES:
            raise RequestError(f"{file} has more than {MAX_BYTES:,} bytes, too many for a configuration file.")
        text = Path(file).read_text(encoding="utf-8")
        _check_tokens(file, text)
        values = yaml.safe_load(text)
    except OSError as error:
        raise RequestError(f"Cannot read the configuration file {file}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{file} is neither YAML nor JSON: {first_line(error)}.") from None
    if not isinstance(values, dict):
        raise RequestError(f"{file} has no options. Write one per line, such as `epochs: 8`.")
    return dotted(values)


def _check_tokens(file: str, text: str) -> None:
    """Reject what takes the parser minutes: aliases, which repeat what they stand for, and deep nesting."""
    import yaml

    opening = (yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken, yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken)
    closing = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        depth += isinstance(token, opening) - isinstance(token, closing)
        if isinstance(token, yaml.AliasToken):
            raise RequestError(f"{file} uses YAML aliases (*name), which are not supported. Write the values out.")
        if depth > MAX_DEPTH:
            raise RequestError(f"{file} is nested too deeply for a configuration file.")


def convert(action: argparse.Action, value: Any) -> Any:
    """The value of a file as the option would read it from the command line; ValueError if it does not."""
    if value is None:
        if action.default is not None:
            raise ValueError("has no value. Give it one, or leave it out.")
        return None
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"cannot be '{value}'. Use true or false.")
        return value
    assert callable(action.type)
    if action.nargs in ("+", "*"):
        return [action.type(_text(item)) for item in (value if isinstance(value, list) else [value])]
    return action.type(_text(value))


def dump(values: Mapping[str, Any]) -> str:
    """Options as YAML, those with dots nested."""
    import yaml

    nested: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = _plain(value)
    return str(yaml.safe_dump(nested, sort_keys=False, default_flow_style=None))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
