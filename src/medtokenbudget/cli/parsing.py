"""What the command modules share: a parser whose options come from the configuration dataclasses."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

set_parsing_settings(docstring_parse_attribute_docstrings=True)


def command_parser(name: str, summary: str, example: str) -> ArgumentParser:
    """A parser for `mtb NAME` whose help ends with an example."""
    parser = ArgumentParser(prog=f"mtb {name}", description=f"{summary}\n\nExample: {example}", exit_on_error=True)
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
