"""The page `reference/cli.md`, made from the options of the commands, so that it cannot differ from `--help`."""

from __future__ import annotations

from itertools import groupby

from medtokenbudget.cli import COMMANDS, command
from medtokenbudget.cli.options import options, paragraphs, spelled

INTRO = """# Commands

Made from the options of the commands: the same as `mtb COMMAND --help-all`. Every command also takes `--config FILE` (options from
a YAML or JSON file), `--print-config` and `--help`. Options are accepted with hyphens and with underscores, budgets also as
percentages.

To complete commands, options and choices in the shell, write the script once and source it in `~/.bashrc` (zsh and fish work the
same way):

```bash
mtb --tyro-write-completion bash ~/.mtb-completion.sh
```

| command | does |
|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    rows = [f"| [`mtb {name}`](#{_anchor(name)}) | {_escape(paragraphs(command(name))[0])} |\n" for name in COMMANDS]
    return INTRO + "".join(rows) + "\n" + "\n".join(map(_command, COMMANDS))


def _command(name: str) -> str:
    made = command(name)
    parts = [f"## mtb {name} {{#{_anchor(name)}}}\n", *(f"{_escape(text)}\n" for text in paragraphs(made))]
    parts.append(f"```text\n{made.example}\n```\n")
    known, defaults = options(made), made.defaults(None)
    for section, members in groupby(known.values(), key=lambda option: option.section):
        rows = ["| option | value | meaning |", "|---|---|---|"]
        for option in members:
            value = "" if option.positional or option.flag else f"`{_escape(option.metavar)}`"
            text = f"{spelled(option.help, known)} {option.hint(defaults.get(option.name, option.default))}".strip()
            rows.append(f"| `{option.spelling}` | {value} | {_escape(text)} |")
        if section.__name__ != "General":
            parts += [f"**{_escape(section.__doc__ or '')}**\n"] * (section is not made) + ["\n".join(rows) + "\n"]
    return "\n".join(parts)


def _anchor(name: str) -> str:
    return f"mtb-{name.replace(' ', '-')}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
