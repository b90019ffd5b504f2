"""Commands that show what is there: `demo`, `report`, `store` and `completion`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.cli import COMMANDS, command
from medtokenbudget.cli.options import CommandParser, Kind, command_list, command_parser, parser_of
from medtokenbudget.config import Count, Seed
from medtokenbudget.errors import UnknownNameError, WorkError


def report(arguments: list[str]) -> int:
    parser = command_parser(
        "report",
        "Write tables, figures and report.html for a finished run. With several runs, compare them: the same tables with one row "
        "per run, and paired differences where the runs evaluated the same images.",
        "mtb report runs/a runs/b --out runs/a-vs-b",
    )
    parser.add_argument(
        "runs", nargs="+", type=str, metavar="RUN", help="Run directories written by `mtb train`, `sweep`, `reproduce` or `demo`."
    )
    parser.add_argument(
        "--out",
        type=str,
        default=None,
        metavar="DIR",
        help="Output directory. Defaults to the run directory; required for several runs.",
    )
    parser.add_argument("--json", action="store_true", help="Print the headline and comparison numbers as JSON on standard output.")
    parser.add_argument("--pictures", type=bool, default=True, help="'false' leaves images of the data set out of the page.")
    options = parser.parse_args(arguments)

    from medtokenbudget.progress import say
    from medtokenbudget.reporting.page import build

    built = build(options.runs, None if options.out is None else Path(options.out), pictures=options.pictures)
    if options.json:
        print(json.dumps({"page": str(built.page), **built.numbers}, indent=2, ensure_ascii=False))
    else:
        print(built.page)
        say(
            f"Open {built.page} in a browser. Tables are in {built.page.parent / 'tables'}, figures in "
            f"{built.page.parent / 'figures'}."
        )
    return 0


def demo(arguments: list[str]) -> int:
    parser = command_parser(
        "demo",
        "A tour in three steps: route drawn samples with the ready-made router; draw dermoscopic images, extract their tokens with "
        "the embedded backbone, train routers and the heads of the other methods and evaluate them at ten budgets; write a report. "
        "Works offline and on a CPU. If it is stopped, the same command resumes.",
        "mtb demo --out runs/demo",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="Run directory to write.")
    parser.add_argument("--n", type=Count, default=1000, help="Number of images to draw.")
    parser.add_argument("--seed", type=Seed, default=0, help="Random seed of the drawings.")
    parser.add_argument(
        "--epochs", type=Count | None, default=None, help="Train for this many epochs, for a quick look. Default: the paper's 50."
    )
    options = parser.parse_args(arguments)

    from medtokenbudget.api import demo
    from medtokenbudget.progress import say
    from medtokenbudget.runs.run import Run, headline

    page = demo(options.out, options.n, options.seed, options.epochs)
    print(headline(Run(options.out).results))
    say(
        f"Report: {page}. Next:\n"
        f"  open {page} in a browser: what was kept, at every budget, beside the controls\n"
        "  mtb route YOUR_IMAGES --overlay --out routed: the ready-made router on your own images\n"
        f"  mtb explore {options.out / 'model'}: look at patches, scores and budgets in the browser\n"
        "  docs/getting-started.md: train a router on your own images and masks"
    )
    return 0


STORE_COMMANDS = {
    "info": "backbone, views, images, size and manifests of a store",
}


def store(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        last = "Run `mtb store COMMAND --help` for the options of a command."
        print(command_list("mtb store COMMAND ...", "Look into a store of tokens.", STORE_COMMANDS, last))
        return 0
    name = arguments[0]
    if name not in STORE_COMMANDS:
        raise UnknownNameError.of("command of mtb store", name, STORE_COMMANDS)
    return _info(arguments[1:])


def _info(arguments: list[str]) -> int:
    parser = command_parser("store info", "Show what is inside a store.", "mtb store info stores/isic")
    parser.add_argument("store", type=Path, help="Folder of the store.")
    parser.add_argument("--json", action="store_true", help="Everything as JSON.")
    given = parser.parse_args(arguments)

    from medtokenbudget.backbone.store import info

    found = info(given.store)
    print(json.dumps(found, indent=2, ensure_ascii=False) if given.json else _text(found))
    if found["damaged"]:
        names = ", ".join(found["damaged"])
        raise WorkError(f"Damaged files in {given.store}: {names}. Delete them and run its `mtb extract` command again.")
    return 0


def _text(found: dict[str, Any]) -> str:
    backbone = found["settings"]["backbone"]
    h, w = backbone["grid"]
    views = {"as-is" if view == "identity" else view: count for view, count in found["views"].items()}
    lines = [
        f"{found['path']}: {found['images']:,} images, {found['rows']:,} rows, {found['bytes'] / 1e6:,.1f} MB",
        f"  backbone   {backbone['name']}, {backbone['image_size']} pixels, {h} x {w} patches of {backbone['dim']} numbers",
        f"  weights    SHA-256 {backbone['weights']}",
        f"  tokens     {'all patches' if found['settings']['keep'] == 'patches' else 'routed'}, {found['settings']['dtype']}",
        f"  signals    {', '.join(found['signals']) or 'none'}",
        f"  views      {', '.join(f'{count:,} {view}' for view, count in views.items()) or 'none'}",
        f"  shards     {found['shards']:,}, {found['missing_shards']:,} missing; {found['failed']:,} rows failed",
    ]
    for one in found["manifests"]:
        fits = "fits" if one["fits"] else f"{one['images'] - one['present']:,} images are not extracted"
        lines.append(f"  manifest   {one['name']} ({one['source']}): {one['images']:,} images, {fits}")
    return "\n".join(lines)


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


def completion(arguments: list[str]) -> int:
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
    from medtokenbudget.cli import data

    return {"data": list(data.COMMANDS), "store": list(STORE_COMMANDS)}


def _names(parser: CommandParser) -> list[str]:
    actions: list[argparse.Action] = parser._actions
    return [name for action in actions for name in action.option_strings if name.startswith("--")]
