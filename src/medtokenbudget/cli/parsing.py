"""What the command modules share: a parser whose options come from the configuration dataclasses."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Container, Sequence
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Help(DefaultHelpFormatter):
    """Help that leaves out what tells nobody anything: simple types, the default of a flag or of an option without one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        kind = self._get_type_str(action) or ""
        if "[" not in kind or kind.startswith("Literal"):
            text = text.replace(", type: %(type)s", "").replace("type: %(type)s, ", "").replace(" (type: %(type)s)", "")
        if action.default is None or action.nargs == 0:
            text = text.replace(", default: %(default)s", "").replace(" (default: %(default)s)", "")
        return text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(textwrap.fill(part, width, subsequent_indent=indent) for part in text.split("\n\n"))


class CommandParser(ArgumentParser):
    """Takes `--batch-size` for `--batch_size` and the other way round."""

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Namespace:  # type: ignore[override]
        spelled = None if args is None else [_spelled(argument, self._option_string_actions) for argument in args]
        return super().parse_args(spelled, *more, **options)


def _spelled(argument: str, known: Container[str]) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    others = (f"--{name.replace('-', '_')}", f"--{name.replace('_', '-')}")
    found = next((other for other in (f"--{name}", *others) if other in known), None)
    return argument if found is None else found + equals + value


def command_parser(name: str, summary: str, example: str) -> ArgumentParser:
    """A parser for `mtb NAME` whose help ends with an example."""
    parser = CommandParser(
        prog=f"mtb {name}", description=f"{summary}\n\nExample: {example}", exit_on_error=True, formatter_class=Help
    )
    parser.add_argument("--config", action="config", help="YAML or JSON file with the same options.")
    return parser


def add_config(parser: ArgumentParser, config: type, key: str | None = None, skip: set[str] | None = None) -> None:
    """The fields of a configuration dataclass as options: `--field`, or `--key.field` when `key` is given."""
    parser.add_class_arguments(config, key, skip=set(skip or ()), sub_configs=True)


def pick(arguments: Namespace, config: type, key: str | None = None) -> Any:
    """The configuration dataclass out of parsed arguments."""
    import dataclasses

    source = arguments if key is None else arguments[key]
    values = {f.name: source[f.name] for f in dataclasses.fields(config) if f.name in source}
    return config(**values)
