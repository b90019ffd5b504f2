"""The parser of a command: options from type annotations and configuration dataclasses, their values, and how `--help` looks.

Options are spelled with hyphens and accepted with underscores too. A wrong value or an unknown option is a `RequestError`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import re
import shutil
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from medtokenbudget.cli import config_file
from medtokenbudget.config import BUDGET, Range
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


@functools.cache
def field_docstrings(config: type) -> dict[str, str]:
    """The text below each field of a dataclass, by field name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, below in zip(body.body, body.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[ast.unparse(field.target)] = inspect.cleandoc(str(below.value.value))
    return texts
