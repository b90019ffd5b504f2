"""What the command modules share: an argparse parser whose options come from type annotations and configuration dataclasses.

Options are spelled with hyphens and accepted with underscores too. A wrong value or an unknown option is a `RequestError`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, get_type_hints

from medtokenbudget.cli import config_file
from medtokenbudget.cli.docstrings import field_docstrings
from medtokenbudget.cli.help import HelpFormatter, usage
from medtokenbudget.cli.values import choice, kind_of
from medtokenbudget.errors import RequestError, UnknownNameError

# What argparse says, and what we say.
_MESSAGES = (
    (r"^the following arguments are required: (.*)$", r"Missing: \1."),
    (r"^argument (\S+): expected (?:one|at least one) argument$", r"Option \1 needs a value."),
    (r"^argument (\S+): ignored explicit argument .*$", r"Option \1 takes no value."),
)
_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


class _Captured(BaseException):
    def __init__(self, parser: CommandParser) -> None:
        self.parser = parser


class _Container(argparse._ActionsContainer):
    """Adds options by type annotation: `type=Path | None`, `type=Literal["a", "b"]`, `type=tuple[int, ...]`."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        if names[0].startswith("--"):
            options.setdefault("dest", names[0][2:].replace("-", "_"))
            names = tuple(name.replace("_", "-") for name in names)
        if options.get("action") is None:
            if "choices" in options:
                options["type"] = choice(list(options.pop("choices")))
            kind, several = kind_of(options.get("type"))
            options["type"] = kind
            options.setdefault("metavar", kind.metavar if kind.metavar and names[0].startswith("-") else _shout(names[0]))
            if several:
                options.setdefault("nargs", "+")
        return super().add_argument(*names, **options)


class Section(_Container, argparse._ArgumentGroup):
    """A group of options with a heading."""


class CommandParser(_Container, argparse.ArgumentParser):
    """The parser of one command."""

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(prog=prog, description=description, formatter_class=HelpFormatter, add_help=False, allow_abbrev=False)
        self.example = example
        self._positionals.title, self._optionals.title = "Arguments", "Options"
        self._general = Section(self, "General")
        self._general.add_argument("--config", metavar="FILE", help="Read options from a YAML or JSON file.")
        self._general.add_argument("--print-config", action="store_true", help="Print all options as YAML and exit.")
        self._general.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def section(self, title: str) -> Section:
        """A new group of options with a heading in the help."""
        return self.add_argument_group(title)

    def add_argument_group(self, title: str, *_: Any, **options: Any) -> Section:  # type: ignore[override]
        group = Section(self, title, **options)
        self._action_groups.append(group)
        return group

    def options(self) -> dict[str, argparse.Action]:
        """Every option and positional argument by its name in the parsed namespace, those for all commands excluded."""
        return {action.dest: action for action in self._actions if action not in self._general._group_actions}

    def parse_args(self, arguments: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse the words after the command.

        Raises:
            RequestError: A value, an option or the configuration file is wrong, or something required is missing.
        """
        if _capturing.get():
            raise _Captured(self)
        words = [_spelled(word) for word in arguments]
        file = config_file.named(words)
        given = set() if file is None else self._apply(config_file.read(file), file)
        if "--print-config" in words:
            self._require_nothing(self.options())
        self._check_names(words)
        parsed, further = self.parse_known_args(words)
        if further:
            self.error(f"Unexpected argument '{further[0]}'.")
        if parsed.print_config:
            print(config_file.dump({name: getattr(parsed, name) for name in self.options()}), end="")
            raise SystemExit(0)
        named = (self._option_string_actions[word.split("=")[0]] for word in words if word.startswith("--"))
        parsed.given = frozenset(given | {action.dest for action in named})
        return parsed

    def error(self, message: str) -> NoReturn:
        for pattern, plain in _MESSAGES:
            message = re.sub(pattern, plain, message)
        raise RequestError(f"{message}\nRun `{self.prog} --help` to see all options.")

    def format_usage(self) -> str:
        return usage(self.prog, self.options().values()) + "\n"

    def format_help(self) -> str:
        formatter = self._get_formatter()
        parts = [self.format_usage(), formatter.wrapped(self.description or ""), f"Example:\n  {self.example}\n"]
        for group in [*self._action_groups, self._general]:
            if group._group_actions:
                formatter.start_section(group.title)
                formatter.add_text(group.description)
                formatter.add_arguments(sorted(group._group_actions, key=lambda action: not action.required))
                formatter.end_section()
        return "\n".join([*parts, formatter.format_help().rstrip()]) + "\n"

    def _get_formatter(self) -> HelpFormatter:
        return HelpFormatter(self.prog)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return action.type(text) if callable(action.type) else text
        except ValueError as error:
            self.error(f"{_label(action)} {error}")

    def _check_names(self, words: Sequence[str]) -> None:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for name in (word.split("=")[0] for word in words if word.startswith("--")):
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                self.error(f"Unknown option {name}." + (f" Did you mean {close[0]}?" if close else ""))

    def _apply(self, values: Mapping[str, Any], file: str) -> set[str]:
        """Take options from a file and return those that it changes: a file of `--print-config` has all of them."""
        known, changed, there = self.options(), set(), []
        for name, value in values.items():
            dest = name.replace("-", "_")
            if dest not in known:
                raise RequestError(f"{file}: {UnknownNameError.of('option', name, known)}")
            action = known[dest]
            if value is None and (action.required or not action.option_strings):
                continue  # printed before it was given
            try:
                read = config_file.convert(action, value)
            except ValueError as error:
                raise RequestError(f"{file}: {dest} {error}") from None
            if _tuple(read) != _tuple(action.default):
                changed.add(dest)
            self.set_defaults(**{dest: read})
            there.append(dest)
        self._require_nothing(there)
        return changed

    def _require_nothing(self, names: Iterable[str]) -> None:
        known = self.options()
        for action in (known[name.replace("-", "_")] for name in names):
            action.required = False
            if not action.option_strings:
                action.nargs = "*" if action.nargs == "+" else "?"


def command_parser(name: str, summary: str, example: str) -> CommandParser:
    """A parser for `mtb NAME` whose help has an example."""
    return CommandParser(f"mtb {name}", summary, example)


def parser_of(main: Callable[[list[str]], object], words: Sequence[str] = ()) -> CommandParser:
    """The parser that a command builds, without running the command."""
    token = _capturing.set(True)
    try:
        main(list(words))
    except _Captured as captured:
        return captured.parser
    finally:
        _capturing.reset(token)
    raise AssertionError("the command parsed no options")


def add_config(
    parser: CommandParser, config: type, title: str | None = None, first: Collection[str] = (), skip: Collection[str] = ()
) -> None:
    """Add the fields of a configuration dataclass as options, their docstrings as help.

    Args:
        parser: Where to add them.
        config: The dataclass. A field that is itself a dataclass is left out: add it with `add_part`.
        title: Heading of the group; None puts all options at the top.
        first: Names of fields that are shown at the top, before all groups.
        skip: Names of fields to leave out.
    """
    section = parser if title is None else parser.section(title)
    for field, annotation, text in _fields(config):
        if field.name not in skip and not dataclasses.is_dataclass(annotation):
            container = parser if field.name in first else section
            container.add_argument(f"--{field.name}", type=annotation, default=_default(field), help=text)


def add_part(parser: CommandParser, config: type, key: str, title: str) -> None:
    """Add the fields of a dataclass that is part of another as `--key.field`, in a group of their own."""
    section = parser.section(title)
    for field, annotation, text in _fields(config):
        section.add_argument(f"--{key}.{field.name}", type=annotation, default=_default(field), help=text)


def pick(options: argparse.Namespace, config: type) -> Any:
    """Build a configuration dataclass from parsed options."""
    values = vars(options)
    return config(**{f.name: _tuple(values[f.name]) for f in dataclasses.fields(config) if f.name in values})


def require_effect(options: argparse.Namespace, condition: bool, needed: str, *names: str) -> None:
    """Reject options that were given although they change nothing: they need `needed`, text such as '--split kfold'."""
    idle = [f"--{name.replace('_', '-')}" for name in names if name in options.given]
    if idle and not condition:
        said = " and ".join(idle)
        raise RequestError(f"{said} only matter{'s' * (len(idle) == 1)} with {needed}. Add that, or leave out {said}.")


def _fields(config: type) -> Iterable[tuple[dataclasses.Field[Any], Any, str]]:
    annotations, texts = get_type_hints(config, include_extras=True), field_docstrings(config)
    return [(field, annotations[field.name], texts.get(field.name, "")) for field in dataclasses.fields(config)]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _label(action: argparse.Action) -> str:
    return f"Option {action.option_strings[0]}" if action.option_strings else f"Argument {action.metavar}"


def _shout(name: str) -> str:
    return name.lstrip("-").rsplit(".")[-1].replace("-", "_").upper()


def _spelled(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
