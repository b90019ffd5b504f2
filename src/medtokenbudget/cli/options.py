"""Commands as data: a frozen dataclass whose fields are the options and whose docstrings are the help. tyro reads the words.

What tyro leaves to us: percentages, ranges in the help, values from a preset or a file (`--config`), and which options were given.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import operator
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from medtokenbudget.config import Range, Settings, plain
from medtokenbudget.errors import RequestError, UnknownNameError, first_line
from medtokenbudget.files import dotted

C = TypeVar("C", bound="Command")
REQUIRED = dataclasses.MISSING
MAX_BYTES = 1_000_000
MARKERS = (tyro.conf.FlagCreatePairsOff,)


@dataclass(frozen=True)
class General(Settings):
    """For every command."""

    config: Path | None = None
    """Read options from a YAML or JSON file. Options on the command line override it."""
    print_config: bool = False
    """Print all options as YAML, which --config reads, and exit."""


@dataclass(frozen=True, kw_only=True)
class Command(Settings):
    """Base of commands. A field that is a dataclass is a section of the help, whose fields are options too."""

    example: ClassVar[str]
    hidden: ClassVar[frozenset[str]] = frozenset()
    """Settings of a section that are no options of this command."""

    general: General = General()
    given: frozenset[str] = frozenset()
    """The options that the user chose: those typed, and those that the file of `--config` changes."""
    words: tuple[str, ...] = ()
    """The words after the command, as typed."""

    @classmethod
    def defaults(cls, named: str | None) -> dict[str, Any]:
        """Return the defaults that differ from the fields', by dotted name, for the preset that the user named."""
        return {}

    def run(self) -> int | None:
        """Do the work and return the exit code; None is success."""
        raise NotImplementedError

    def require_effect(self, condition: bool, needed: str, *names: str) -> None:
        """Reject options that were given although they change nothing without `needed`, text such as '`split="kfold"`'."""
        idle = [f"`{name}`" for name in names if name in self.given]
        if idle and not condition:
            listed = " and ".join(idle)
            raise RequestError(f"{listed} only matter{'s' * (len(idle) == 1)} with {needed}. Add that, or leave out {listed}.")


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str
    """As Python users know it: 'batch_size', 'lats.hidden'."""
    field: str
    section: type[Settings]
    """The dataclass that has the field."""
    kind: Any
    """The type of one value: `int`, `Path`, a `Literal`, ..."""
    several: bool
    notes: tuple[Any, ...]
    """What the annotation adds to the type: a `Range`, or that the option is positional."""
    default: Any
    """`REQUIRED` if it has none."""
    help: str

    @property
    def positional(self) -> bool:
        return tyro.conf.Positional in self.notes

    @property
    def flag(self) -> bool:
        """Whether the option takes no value."""
        return self.kind is bool and self.default is False

    @property
    def spelling(self) -> str:
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        one = self.spelling if self.positional else _kind(self.kind)[0]
        if self.several:
            return f"{one} [{one} ...]"
        return f"[{one}]" if self.positional and self.default is not REQUIRED else one

    def hint(self, default: Any) -> str:
        """Return the range and the default, as one would type it."""
        if default is REQUIRED:
            return "(required)"
        # That a count is at least 0 or 1 goes without saying.
        hints = [
            str(note)
            for note in self.notes
            if isinstance(note, Range) and (self.kind is float or note.low not in (0, 1) or note.odd)
        ]
        if default not in (None, ()) and not self.flag:
            hints.append(f"default: {_typed(default)}")
        return f"({'; '.join(hints)})" if hints else ""

    def read(self, words: Sequence[str]) -> Any:
        """Return the value that the words say; a ValueError names the one that says none."""
        _, allowed, read = _kind(self.kind)
        values = []
        for word in words:
            try:
                values.append(read(word))
            except ValueError:
                raise ValueError(f"'{word}' is not {allowed}.") from None
        return tuple(values) if self.several else values[0]


def options(command: type[Command]) -> dict[str, Option]:
    """Return every option of a command by its name, in the order of the help."""
    return {option.name: option for option in _walk(command, command.hidden | {"given", "words"})}


def _walk(settings: type[Any], hidden: frozenset[str]) -> Iterator[Option]:
    kinds = get_type_hints(settings, include_extras=True)
    texts = {
        name: text
        for base in reversed(settings.__mro__)
        for name, text in _docstrings(base.__module__).get(base.__name__, {}).items()
    }

    def order(entry: dataclasses.Field[Any]) -> tuple[bool, bool, bool]:
        """Required options first, then the others, then sections, the one that all commands have last."""
        return entry.name == "general", dataclasses.is_dataclass(kinds[entry.name]), entry.default is not REQUIRED

    for entry in sorted(dataclasses.fields(settings), key=order):
        if dataclasses.is_dataclass(kinds[entry.name]):
            yield from _walk(kinds[entry.name], hidden)
        elif entry.name not in hidden:
            name = f"{settings.prefix}{entry.name}"
            yield Option(name, entry.name, settings, *_unwrap(kinds[entry.name]), entry.default, texts[entry.name])


def _unwrap(kind: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """Split an annotation into the type of one value, whether there are several, and what is noted about it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner, several, notes = _unwrap(arguments[0])
        return inner, several, (*arguments[1:], *notes)
    if origin in (Union, types.UnionType):
        return _unwrap(next(argument for argument in arguments if argument is not types.NoneType))
    if origin is tuple:
        inner, _, notes = _unwrap(arguments[0])
        return inner, True, notes
    return kind, False, ()


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """The text below each field of the classes in a module. One parse: `inspect` parses the module again for each class."""
    texts: dict[str, dict[str, str]] = {}
    file = getattr(sys.modules[module], "__file__", None)
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body if file else []
    for node in (node for node in body if isinstance(node, ast.ClassDef)):
        for entry, below in zip(node.body, node.body[1:]):
            if isinstance(entry, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts.setdefault(node.name, {})[ast.unparse(entry.target)] = " ".join(str(below.value.value).split())
    return texts


def parse(command: type[C], name: str, words: Sequence[str]) -> C | None:
    """Read the words after a command, and the file and the preset that they name.

    Returns:
        The command, or None after `--print-config`.

    Raises:
        RequestError: A value or the configuration file is wrong.
        SystemExit: tyro showed the help (0), or what it could not read (2).
    """
    known = options(command)
    typed = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    file = _value_of("--config", words)
    filed = {} if file is None else _read_file(file, known)
    defaults = {option.name: option.default for option in known.values()}
    defaults |= command.defaults(_value_of("--preset", words) or filed.get("preset"))
    starting = defaults | filed
    if "print_config" in typed:
        starting |= {key: None for key, value in starting.items() if value is REQUIRED}
    read = tyro.cli(_parser(command, starting), prog=f"mtb {name}", description=_description(command), args=words, config=MARKERS)
    values = {key: getattr(getattr(read, option.section.__name__, read), option.field) for key, option in known.items()}
    values |= {key: values[key] or starting[key] for key, option in known.items() if option.flag}
    if values.pop("print_config"):
        print(_yaml({key: value for key, value in values.items() if key != "config"}), end="")
        return None
    for key, value in values.items():
        if value == () and (key in typed or defaults[key] is REQUIRED):
            raise RequestError(f"`{key}` needs a value. Run `mtb {name} --help` to see all options.")
    chosen = typed & known.keys() | {key for key in filed if values[key] != defaults[key]}
    made: C = _build(command, values, given=frozenset(chosen), words=tuple(words))
    return made


def spelled(message: str, known: Mapping[str, Option]) -> str:
    """Return a text with its settings as one types them: `lr` is --lr, `losses.lesion=0` is --losses.lesion 0."""

    def spell(match: re.Match[str]) -> str:
        option, value = known.get(match["name"]), match["value"]
        if option is None:
            return match[0]
        if value is None or option.flag:
            return option.spelling
        return f"{option.spelling} {value.lower() if value in ('True', 'False') else value}"

    return re.sub(r"`(?P<name>[a-z_][\w.]*)(=(?P<quote>[\"']?)(?P<value>[^`\"']*)(?P=quote))?`", spell, message)


def paragraphs(command: type[Command]) -> list[str]:
    """Return what the help says about a command: a sentence, and perhaps more."""
    return [" ".join(text.split()) for text in (command.__doc__ or "").split("\n\n")]


def print_completion(commands: Mapping[str, type[Command]], words: Sequence[str]) -> None:
    """Print or write the script that completes `mtb` in a shell, as tyro's option at the start of `words` says."""

    def union(group: str) -> Any:
        members: dict[str, Any] = {}
        for name, command in commands.items():
            first, _, rest = name.removeprefix(group).partition(" ")
            if name.startswith(group) and rest:
                members[first] = dataclasses.make_dataclass(
                    first, [("command", Annotated[union(f"{first} "), tyro.conf.arg(name="")])]
                )
            elif name.startswith(group):
                members[first] = _parser(command, {})
        chosen = tuple(Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)] for name, kind in members.items())
        return functools.reduce(operator.or_, chosen, None)

    tyro.cli(union(""), prog="mtb", args=words, config=MARKERS)


def _parser(command: type[Command], defaults: Mapping[str, Any]) -> Any:
    """Return the dataclass that tyro reads: the options of the command, with one dataclass for each section."""
    members: dict[type[Settings], list[tuple[str, Any, Any]]] = {command: []}
    known = options(command)
    for option in known.values():
        default = defaults.get(option.name, option.default)
        shown = tyro.conf.arg(
            name=option.name,
            prefix_name=False,
            metavar=None if option.flag else option.metavar,
            help=spelled(option.help, known),
            help_behavior_hint=option.hint(default),
        )
        kind = bool if option.flag else Annotated[(object, _constructor(option), *option.notes)]
        # A flag is always off at first: tyro would turn one that a file sets into --no-flag.
        entry = dataclasses.field(default=False if option.flag else default)
        members.setdefault(option.section, []).append((option.field, Annotated[kind, shown], entry))
    entries = members.pop(command)
    for section, inner in members.items():
        made = dataclasses.make_dataclass(section.__name__, inner, kw_only=True)
        title = section.prefix.rstrip(".") or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config")).lower()
        heading = tyro.conf.arg(name=title, prefix_name=False, help=section.__doc__)
        entries.append((section.__name__, Annotated[made, heading], dataclasses.field()))
    return dataclasses.make_dataclass(command.__name__, entries, kw_only=True)


def _description(command: type[Command]) -> str:
    width = min(110, shutil.get_terminal_size().columns)
    # Indented, because tyro joins lines that begin with a letter.
    about = textwrap.fill(" ".join(paragraphs(command)), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return f"{about}\n\nExample:\n  {command.example}"


def _build(settings: type[Any], values: Mapping[str, Any], **further: Any) -> Any:
    """Make a dataclass and its sections from the values of options; hidden settings keep their defaults."""
    kinds = get_type_hints(settings)
    for entry in dataclasses.fields(settings):
        name = f"{settings.prefix}{entry.name}"
        if dataclasses.is_dataclass(kinds[entry.name]):
            further[entry.name] = _build(kinds[entry.name], values)
        elif name in values:
            further[entry.name] = values[name]
    return settings(**further)


def _constructor(option: Option) -> PrimitiveConstructorSpec[Any]:
    """Return how tyro reads an option. Its own way knows no percentages and no `true`, and its messages have terms of Python."""
    return PrimitiveConstructorSpec(
        nargs="*" if option.several else 1,
        metavar=option.metavar,
        instance_from_str=option.read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [_typed(value)],
        choices=get_args(option.kind) or None,
    )


def _number(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not math.isfinite(value):
        raise ValueError
    return value


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "yes", "false", "no"):
        raise ValueError
    return text.lower() in ("true", "yes")


def _path(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(text)


_KINDS: dict[Any, tuple[str, str, Callable[[str], Any]]] = {
    int: ("N", "a whole number", int),
    float: ("X", "a number", _number),
    bool: ("{true,false}", "true or false", _truth),
    Path: ("PATH", "a path", _path),
    str: ("TEXT", "text", str),
}


def _kind(kind: Any) -> tuple[str, str, Callable[[str], Any]]:
    """What the help shows for a value, what a message says is allowed, and how a word is read."""
    choices = get_args(kind)
    if choices:  # a `Literal`
        return "{" + ",".join(choices) + "}", f"one of {', '.join(choices)}", lambda word: choices[choices.index(word)]
    return _KINDS[kind]


def _typed(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(_typed, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The value of an option, before anything is parsed."""
    for word, following in zip(words, [*words[1:], None]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following
    return None


def _read_file(file: str, known: Mapping[str, Option]) -> dict[str, Any]:
    """Read the options in a file, by dotted name."""
    values = {}
    for written, value in dotted(_load(file)).items():
        name = written.replace("-", "_")
        if name not in known:
            raise RequestError(f"{file}: {UnknownNameError.of('option', written, known)}")
        if value is None and known[name].default not in (None, REQUIRED):
            raise RequestError(f"{file}: {name} has no value. Give it one, or leave it out.")
        if value is not None:
            words = [str(item) for item in (value if isinstance(value, list) else [value])]
            try:
                values[name] = known[name].read(words)
            except (ValueError, IndexError) as error:
                raise RequestError(f"{file}: {name} cannot be read: {error}") from None
    return values


def _load(file: str) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Without aliases: a few of them, nested, stand for more values than memory has."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise RequestError(f"{file} uses YAML aliases (*name), which are not supported. Write the values out.")
            return super().compose_node(parent, index)

    try:
        if Path(file).stat().st_size > MAX_BYTES:
            raise RequestError(f"{file} has more than {MAX_BYTES:,} bytes, too many for a configuration file.")
        values = yaml.load(Path(file).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise RequestError(f"Cannot read the configuration file {file}: {error.strerror}.") from None
    except RequestError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RequestError(f"{file} is neither YAML nor JSON: {first_line(error)}.") from None
    if not isinstance(values, dict):
        raise RequestError(f"{file} has no options. Write one per line, such as `epochs: 8`.")
    return values


def _yaml(values: Mapping[str, Any]) -> str:
    """Write options as YAML, those with dots nested."""
    import yaml

    nested: dict[str, Any] = {}
    for name, value in values.items():
        part, _, last = name.rpartition(".")
        (nested.setdefault(part, {}) if part else nested)[last] = plain(value)
    return str(yaml.safe_dump(nested, sort_keys=False, default_flow_style=None))
