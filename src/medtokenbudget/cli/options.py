"""Commands are frozen dataclasses: the fields are the options, the text below each field is its help. tyro reads the words.

Ours are percentages, ranges in the help, options from a file or a preset (`--config`, `--preset`), and which options were given.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import shutil
import sys
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from medtokenbudget import config
from medtokenbudget.config import Kind, Settings
from medtokenbudget.errors import RequestError, UnknownNameError, first_line
from medtokenbudget.files import dotted

C = TypeVar("C", bound="Command")
REQUIRED = dataclasses.MISSING
# Flags have no --no-FLAG.
MARKERS = (tyro.conf.FlagCreatePairsOff,)


@dataclass(frozen=True)
class General(Settings):
    """For every command."""

    config: Path | None = None
    """Read options from a YAML or JSON file. Options on the command line override it."""
    print_config: bool = False
    """Print all options as YAML, which --config reads, and exit."""


@dataclass(frozen=True, kw_only=True)
class Command(Settings, ABC):
    """Base of commands. A field that is a dataclass is a section of the help, whose fields are options too."""

    example: ClassVar[str]
    hidden: ClassVar[frozenset[str]] = frozenset()
    """Settings of a section that are no options of this command."""
    first: ClassVar[frozenset[str]] = frozenset()
    """What `--help` shows of a long command, at most ten options; `--help-all` shows the others too."""

    general: General = General()
    given: frozenset[str] = frozenset()
    """The options that the user typed, and those that the file of `--config` changes."""
    words: tuple[str, ...] = ()
    """The words after the command, as typed."""

    @classmethod
    def defaults(cls, named: str | None) -> dict[str, Any]:
        """Return the defaults that differ from the fields', by dotted name, for the preset that the user named."""
        return {}

    @abstractmethod
    def run(self) -> int | None:
        """Do the work and return the exit code; None is success."""

    def require_effect(self, condition: bool, needed: str, *names: str) -> None:
        """Reject options that were given although they change nothing without `needed`, text such as '`split="kfold"`'."""
        idle = [f"`{name}`" for name in names if name in self.given]
        if idle and not condition:
            listed = " and ".join(idle)
            raise RequestError(f"{listed} only matter{'s' * (len(idle) == 1)} with {needed}. Add that, or leave out {listed}.")


@dataclass(frozen=True)
class Engine(Settings):
    """Base of the sections about where the work is done."""

    engine: Literal["local", "ray"] = "local"
    """Where to run: on this machine or on Ray."""
    address: str | None = None
    """Address of a running Ray cluster: auto or host:port."""


@dataclass(frozen=True)
class Option:
    """One option of a command, by the name that Python users know: 'batch_size', 'lats.hidden'."""

    name: str
    section: type[Settings]
    kind: Kind
    default: Any
    """`REQUIRED` if it has none."""
    help: str

    @property
    def field(self) -> str:
        return self.name.removeprefix(self.section.prefix)

    @property
    def positional(self) -> bool:
        return tyro.conf.Positional in self.kind.notes

    @property
    def flag(self) -> bool:
        """Whether the option takes no value."""
        return self.kind.type is bool and self.default is False

    @property
    def spelling(self) -> str:
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        one = self.spelling if self.positional else self._reader[0]
        if self.kind.several:
            return f"{one} [{one} ...]"
        return f"[{one}]" if self.positional and self.default is not REQUIRED else one

    def hint(self, default: Any) -> str:
        """Return the range and the default, as one would type it."""
        if default is REQUIRED:
            return "(required)"
        # That a count is at least 0 or 1 goes without saying.
        limits = self.kind.limits
        hints = [str(limits)] * (limits is not None and (self.kind.type is float or limits.low not in (0, 1) or limits.odd))
        if default not in (None, ()) and not self.flag:
            hints.append(f"default: {_typed(default)}")
        return f"({'; '.join(hints)})" if hints else ""

    @property
    def _reader(self) -> tuple[str, str, Callable[[str], Any]]:
        """What the help shows for a value, what a message says is allowed, and how a word is read."""
        if choices := get_args(self.kind.type):  # of a `Literal`
            return "{" + ",".join(choices) + "}", f"one of {', '.join(choices)}", lambda word: choices[choices.index(word)]
        return _READERS[self.kind.type]

    def read(self, words: Sequence[str]) -> Any:
        """Return the value that the words say; a ValueError names the one that says none."""
        _, allowed, read = self._reader
        values = []
        for word in words:
            try:
                values.append(read(word))
            except ValueError:
                raise ValueError(f"'{word}' is not {allowed}.") from None
        return tuple(values) if self.kind.several else values[0]


def options(command: type[Command]) -> dict[str, Option]:
    """Return every option of a command by its name, in the order of the help."""
    return {option.name: option for option in _walk(command, command.hidden | {"given", "words"})}


def _walk(settings: type[Any], hidden: frozenset[str]) -> Iterator[Option]:
    kinds = config.field_annotations(settings)  # type: ignore[arg-type]
    texts: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        texts |= _docstrings(base.__module__).get(base.__name__, {})

    def order(entry: dataclasses.Field[Any]) -> tuple[bool, bool, bool]:
        """Required options first, then the others, then sections, the one that all commands have last."""
        return entry.name == "general", dataclasses.is_dataclass(kinds[entry.name]), entry.default is not REQUIRED

    for entry in sorted(dataclasses.fields(settings), key=order):
        if dataclasses.is_dataclass(kinds[entry.name]):
            yield from _walk(kinds[entry.name], hidden)
        elif entry.name not in hidden:
            # A text names a constant as {DEFAULT_BUDGET}, so that its value is written once.
            text = texts[entry.name].format_map(vars(config))
            yield Option(f"{settings.prefix}{entry.name}", settings, Kind.of(kinds[entry.name]), entry.default, text)


@functools.cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """The text below each field of the classes in a module. One parse: tyro's own way parses each class again."""
    texts: dict[str, dict[str, str]] = {}
    file = getattr(sys.modules[module], "__file__", None)
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body if file else []
    for node in (node for node in body if isinstance(node, ast.ClassDef)):
        for entry, below in zip(node.body, node.body[1:]):
            if isinstance(entry, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts.setdefault(node.name, {})[ast.unparse(entry.target)] = " ".join(str(below.value.value).split())
    return texts


def parse(command: type[C], name: str, words: Sequence[str]) -> C | None:
    """Read the words after a command, and the file and the preset that they name; None after `--print-config`."""
    known = options(command)
    # From the words, because tyro does not tell what was typed and what is a default.
    typed = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    file = _value_of("--config", words)
    filed = {} if file is None else _read_file(file, known)
    defaults = {option.name: option.default for option in known.values()}
    recipe = _value_of("--recipe", words) or filed.get("recipe")
    # A scout has settings of its own: those of another preset would not fit it.
    defaults |= command.defaults(_value_of("--preset", words) or filed.get("preset") or (recipe if recipe == "scout" else None))
    starting = defaults | filed
    # A template for a file can be printed without what is required.
    if "print_config" in typed:
        starting |= {key: None for key, value in starting.items() if value is REQUIRED}
    width = min(110, shutil.get_terminal_size().columns)
    # Indented, because tyro joins lines that begin with a letter.
    about = spelled(" ".join(paragraphs(command)), known)
    about = textwrap.fill(about, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    description = f"{about}\n\nExample:\n  {command.example}"
    shown: frozenset[str] | None = None
    if "--help-all" in words:
        words = ["--help"]
    elif command.first and not {"-h", "--help"}.isdisjoint(words):
        shown = command.first
        description += f"\n\nMore options:\n  mtb {name} --help-all"
    made_of = parser(command, starting, shown)
    read = tyro.cli(made_of, prog=f"mtb {name}", description=description, args=words, config=MARKERS)
    values = {key: getattr(getattr(read, option.section.__name__, read), option.field) for key, option in known.items()}
    # A flag can only be turned on, so one that a file sets stays set.
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


def parser(command: type[Command], defaults: Mapping[str, Any], shown: Container[str] | None = None) -> Any:
    """Return the dataclass that tyro reads: the options of a command, or some of them, with one dataclass for each section."""
    known = options(command)
    sections: list[tuple[str, Any, Any]] = []
    asked = [option for option in known.values() if shown is None or option.name in shown]
    for section, members in groupby(asked, key=lambda option: option.section):
        entries = [_argument(option, known, defaults.get(option.name, option.default)) for option in members]
        if section is command:
            sections = entries
            continue
        title = section.prefix.rstrip(".") or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config")).lower()
        heading = tyro.conf.arg(name=title, prefix_name=False, help=section.__doc__)
        made = dataclasses.make_dataclass(section.__name__, entries, kw_only=True)
        sections.append((section.__name__, Annotated[made, heading], dataclasses.field()))
    return dataclasses.make_dataclass(command.__name__, sections, kw_only=True)


def _argument(option: Option, known: Mapping[str, Option], default: Any) -> tuple[str, Any, Any]:
    """The field that tyro reads one option from. Its own readers know no percentages, and their messages have terms of Python."""
    help_text = tyro.conf.arg(
        name=option.name,
        prefix_name=False,
        metavar=None if option.flag else option.metavar,
        help=spelled(option.help, known),
        help_behavior_hint=option.hint(default),
    )
    if option.flag:  # off at first: tyro would turn one that a file sets into --no-flag
        return option.field, Annotated[bool, help_text], dataclasses.field(default=False)
    reader: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*" if option.kind.several else 1,
        metavar=option.metavar,
        instance_from_str=option.read,
        is_instance=lambda value: True,
        str_from_instance=lambda value: [_typed(value)],
        choices=get_args(option.kind.type) or None,
    )
    return option.field, Annotated[(object, reader, *option.kind.notes, help_text)], dataclasses.field(default=default)


def _build(settings: type[Any], values: Mapping[str, Any], **further: Any) -> Any:
    """Make a dataclass and its sections from the values of options; hidden settings keep their defaults."""
    for field, kind in config.field_annotations(settings).items():  # type: ignore[arg-type]
        name = f"{settings.prefix}{field}"
        if isinstance(kind, type) and issubclass(kind, Settings):
            further[field] = _build(kind, values)
        elif name in values:
            further[field] = values[name]
    return settings(**further)


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "yes", "false", "no"):
        raise ValueError
    return text.lower() in ("true", "yes")


def _path(text: str) -> Path:
    if not text:  # a variable of the shell that is not set, which `Path` would take for the current folder
        raise ValueError
    return Path(text)


_READERS: dict[Any, tuple[str, str, Callable[[str], Any]]] = {
    int: ("N", "a whole number", int),
    float: ("X", "a number", config.number),
    bool: ("{true,false}", "true or false", _truth),
    Path: ("PATH", "a path", _path),
    str: ("TEXT", "text", str),
}


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
    """Read the options in a YAML or JSON file, by dotted name."""
    import yaml

    try:
        written = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"Cannot read the configuration file {file}: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RequestError(f"{file} is neither YAML nor JSON: {first_line(error)}.") from None
    if not isinstance(written, dict):
        raise RequestError(f"{file} has no options. Write one per line, such as `epochs: 8`.")
    values = {}
    for key, value in dotted(written).items():
        name = key.replace("-", "_")
        if name not in known:
            raise RequestError(f"{file}: {UnknownNameError.of('option', key, known)}")
        if value is None and known[name].default not in (None, REQUIRED):
            raise RequestError(f"{file}: {name} has no value. Give it one, or leave it out.")
        if value is not None:
            try:
                values[name] = known[name].read([str(item) for item in (value if isinstance(value, list) else [value])])
            except (ValueError, IndexError) as error:
                raise RequestError(f"{file}: {name} cannot be read: {error}") from None
    return values


def _yaml(values: Mapping[str, Any]) -> str:
    """Write options as YAML, those with dots nested."""
    import yaml

    nested: dict[str, Any] = {}
    for name, value in values.items():
        part, _, last = name.rpartition(".")
        (nested.setdefault(part, {}) if part else nested)[last] = config.plain(value)
    return str(yaml.safe_dump(nested, sort_keys=False, default_flow_style=None))
