"""`mtb completion`: a script for bash or zsh that completes commands, options and choices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Literal

from medtokenbudget.cli import COMMANDS, command
from medtokenbudget.cli.parsing import CommandParser, command_parser, parser_of
from medtokenbudget.cli.values import Kind

SCRIPT = """\
# Completion of mtb, written by `mtb completion`. Words that it does not know complete to file names.
{zsh}_mtb() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words=""
    case "$command" in
        {groups}) [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}" ;;
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        words="{commands}"
{members}
    elif [ "${{word#-}}" = "$word" ]; then
        case "$command $before" in
{choices}
        esac
    else
        case "$command" in
{options}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mtb mtb
"""


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "completion",
        "Print a script that completes commands, options and choices in the shell. Put the line of the example into ~/.bashrc, or "
        "the same with zsh into ~/.zshrc.",
        'eval "$(mtb completion bash)"',
    )
    parser.add_argument("shell", type=Literal["bash", "zsh"], help="The shell to write for: bash or zsh.")
    options = parser.parse_args(arguments)
    print(script(options.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for a shell."""
    parsers = dict(all_parsers())
    choices = [
        f'            "{name} {option}") words="{" ".join(action.type.choices)}" ;;'
        for name, parser in parsers.items()
        for action in parser.options().values()
        if isinstance(action.type, Kind) and action.type.choices
        for option in action.option_strings
    ]
    options = [f'            "{name}") words="{" ".join(_names(parser))}" ;;' for name, parser in parsers.items()]
    return SCRIPT.format(
        zsh="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(COMMANDS),
        groups="|".join(_groups()),
        members="\n".join(
            f'    elif [ "$command" = {name} ]; then\n        words="{" ".join(members)}"' for name, members in _groups().items()
        ),
        choices="\n".join(choices),
        options="\n".join(options),
    )


def all_parsers() -> Iterator[tuple[str, CommandParser]]:
    """The parser of every command, those of `mtb data` and `mtb store` as 'data isic' and so on."""
    groups = _groups()
    for name in COMMANDS:
        if name in groups:
            yield from ((f"{name} {member}", parser_of(command(name), [member])) for member in groups[name])
        else:
            yield name, parser_of(command(name))


def _groups() -> dict[str, list[str]]:
    """Commands that have commands of their own."""
    from medtokenbudget.cli import data, store

    return {"data": list(data.COMMANDS), "store": list(store.COMMANDS)}


def _names(parser: CommandParser) -> list[str]:
    actions: list[argparse.Action] = parser._actions
    return [name for action in actions for name in action.option_strings if name.startswith("--")]
