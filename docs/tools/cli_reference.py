"""The page `reference/cli.md`, made from the parsers of the commands, so that it cannot differ from `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from medtokenbudget.cli import COMMANDS
from medtokenbudget.cli.options import CommandParser, shown, usage
from medtokenbudget.cli.show import all_parsers

INTRO = """# Commands

Made from the parsers of the commands: the same as `mtb COMMAND --help`. Every command also takes `--config FILE` (options from a
YAML or JSON file), `--print-config` and `--help`. Options are accepted with hyphens and with underscores, budgets also as
percentages.

| command | does |
|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    rows = "".join(f"| [`mtb {name}`](#{_anchor(name)}) | {_escape(text)} |\n" for name, text in COMMANDS.items())
    return INTRO + rows + "\n" + "\n".join(_command(name, parser) for name, parser in all_parsers())


def _command(name: str, parser: CommandParser) -> str:
    parts = [f"## mtb {name} {{#mtb-{name.replace(' ', '-')}}}\n", f"{_escape(parser.description or '')}\n"]
    parts.append(f"```text\n{usage(parser.prog, parser.options().values())}\nExample: {parser.example}\n```\n")
    for group in parser._action_groups:
        if group._group_actions:
            parts += [f"**{group.title}**\n", _options(group._group_actions)]
    return "\n".join(parts)


def _options(actions: Iterable[argparse.Action]) -> str:
    rows = ["| option | value | meaning |", "|---|---|---|"]
    for action in sorted(actions, key=lambda action: not action.required):
        name = action.option_strings[0] if action.option_strings else str(action.metavar)
        rows.append(f"| `{name}` | {_value(action)} | {_escape(_text(action))} |")
    return "\n".join(rows) + "\n"


def _value(action: argparse.Action) -> str:
    if not action.option_strings or action.nargs == 0:
        return ""
    several = " ..." if action.nargs in ("+", "*") else ""
    return f"`{_escape(str(action.metavar))}`{several}"


def _text(action: argparse.Action) -> str:
    text = " ".join((action.help or "").split())
    if action.option_strings and action.required:
        return f"{text} Required."
    if action.option_strings and action.nargs != 0 and action.default not in (None, argparse.SUPPRESS, "", []):
        return f"{text} Default: {shown(action.default)}."
    return text


def _anchor(name: str) -> str:
    """The heading that a command leads to: its own, or that of its first member."""
    first = next(full for full, _ in all_parsers() if full.split()[0] == name)
    return f"mtb-{first.replace(' ', '-')}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
