"""How `--help` looks: one short usage line, an example to copy, options in groups, defaults without brackets and quotes."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

WIDEST = 110


def width() -> int:
    """Columns of the help."""
    return min(WIDEST, shutil.get_terminal_size().columns - 2)


def usage(prog: str, actions: Iterable[argparse.Action]) -> str:
    """`Usage: mtb COMMAND ARGUMENTS --required VALUE [options]`."""
    words = []
    for action in sorted(actions, key=lambda action: bool(action.option_strings)):
        value = str(action.metavar) + (" ..." if action.nargs in ("+", "*") else "")
        if not action.option_strings:
            words.append(f"[{value}]" if action.nargs in ("?", "*") else value)
        elif action.required:
            words.append(f"{action.option_strings[0]} {value}")
    return f"Usage: {prog} {' '.join([*words, '[options]'])}"


def command_list(usage: str, summary: str, commands: Mapping[str, str], last: str) -> str:
    """The help of a command that has commands of its own."""
    column = max(map(len, commands)) + 2
    wrapper = textwrap.TextWrapper(width(), "  ", " " * (column + 2), break_on_hyphens=False)
    rows = [wrapper.fill(f"{name:<{column}}{text}") for name, text in commands.items()]
    return "\n".join([f"Usage: {usage}", "", summary, "", "Commands:", *rows, "", last])


def shown(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, (list, tuple)):
        return " ".join(shown(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class HelpFormatter(argparse.HelpFormatter):
    """Help with defaults as one would type them, and nothing about types of the language."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=width())

    def wrapped(self, text: str) -> str:
        """Text in lines of the right length."""
        return textwrap.fill(text, width(), break_on_hyphens=False) + "\n"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.option_strings and action.required:
            text += " (required)"
        elif action.option_strings and action.nargs != 0 and action.default not in (None, argparse.SUPPRESS, "", []):
            text += f" (default: {shown(action.default)})"
        return text.replace("%", "%%")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        metavar = str(action.metavar or default_metavar)
        return f"{metavar} ..." if action.nargs in ("+", "*") else super()._format_args(action, default_metavar)
