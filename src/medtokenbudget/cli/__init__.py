"""The command `mtb`. Each command is a dataclass of options whose `run` calls one public function.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro

from medtokenbudget import __version__
from medtokenbudget.cli.options import Command, options, paragraphs, parse, parser, spelled
from medtokenbudget.config import NOTICE
from medtokenbudget.errors import MedTokenBudgetError, UnknownNameError

COMMANDS: dict[str, str] = {
    "route": "use.Route",
    "train": "learn.Train",
    "evaluate": "use.Evaluate",
    "reproduce": "learn.Reproduce",
    "demo": "show.Demo",
    "data download": "data.Download",
    "data isic": "data.Isic",
    "data kvasir": "data.Kvasir",
    "data folder": "data.Folder",
    "data csv": "data.Csv",
    "data synthetic": "data.Synthetic",
    "data split": "data.SplitAgain",
    "data check": "data.CheckData",
    "extract": "learn.Extract",
    "store info": "show.StoreInfo",
    "sweep": "learn.Sweep",
    "report": "show.WriteReport",
    "selectors": "show.Selectors",
    "calibrate": "learn.Calibrate",
    "predict": "use.Predict",
    "serve": "use.Serve",
    "explore": "use.Explore",
    "export": "use.Export",
}
"""Chapter and class of each command, in the order in which people need them."""
GROUPS = {
    "data": "Download public data; make a manifest (ISIC 2019, Kvasir v2, folders, CSV, drawn images), split it, check it.",
    "store": "Show what is inside a store of tokens.",
}
"""Commands that have commands of their own."""
ABOUT = "Lesion-preserving token routing for dermoscopic images."


def command(name: str) -> type[Command]:
    """Return the class of a command; only its chapter is imported."""
    chapter, _, kind = COMMANDS[name].partition(".")
    made: type[Command] = getattr(importlib.import_module(f"{__name__}.{chapter}"), kind)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, by default that of the process. Return 0 for success, 1 if work failed, 2 for a wrong request."""
    words = list(sys.argv[1:] if argv is None else argv)
    group = words[:1] if words and words[0] in GROUPS else []
    before, rest = [*group, *words[len(group) : len(group) + 1]], words[len(group) + 1 :]
    name = " ".join(before)
    asked: type[Command] | None = None
    try:
        if name == "--version":
            print(_version(), flush=True)
            return 0
        if name in COMMANDS:
            asked = command(name)
            request = parse(asked, name, rest)
            return 0 if request is None else request.run() or 0
        if before == group or before[-1] == "help":
            words = [*group, "--help"]
        elif not before[-1].startswith("-"):
            known = {entry.split()[len(group)] for entry in COMMANDS if entry.split()[: len(group)] == group}
            raise UnknownNameError.of(" of mtb ".join(["command", *group]), before[-1], known)
        about = f"{ABOUT} Run `mtb COMMAND --help` for the options of a command, `mtb --version` for versions and devices. {NOTICE}"
        tyro.cli(_all_commands(), prog="mtb", description=about, args=words)
        return 0
    except SystemExit as stop:  # tyro showed the help, or what is wrong
        _flush()
        return int(stop.code or 0)
    except MedTokenBudgetError as error:
        print(f"mtb: {spelled(str(error), {} if asked is None else options(asked))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nmtb: Stopped. Run the same command again to continue.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _flush()
        return 1
    except MemoryError:
        print("mtb: Out of memory. Close other programs, or use fewer workers or jobs or a smaller batch.", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"mtb: {where}{error.strerror or error}. Check the disk, the permissions and `ulimit -n`.", file=sys.stderr)
        return 1


def _flush() -> None:
    """Write what is buffered now: at the end of the process a reader that is gone would be a traceback."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _all_commands(group: str = "") -> Any:
    """Return what tyro reads to list or complete the commands of `mtb`, or of one of its groups ('data ')."""
    # Also because tyro makes commands of unions only, and `mtb store` has one command.
    members: dict[str, tuple[Any, str]] = {"help": (dataclasses.make_dataclass("Help", ()), "Show this list.")}
    for name in (name.removeprefix(group) for name in COMMANDS if name.startswith(group)):
        first, _, rest = name.partition(" ")
        if not rest:
            kind = command(group + name)
            members[first] = parser(kind, {}), paragraphs(kind)[0]
        elif first not in members:
            inner: Any = Annotated[_all_commands(f"{first} "), tyro.conf.arg(name="")]
            members[first] = dataclasses.make_dataclass(first, [("command", inner)]), GROUPS[first]
    named = {name: tyro.conf.subcommand(name, prefix_name=False, description=text) for name, (_, text) in members.items()}
    return Union[tuple(Annotated[kind, named[name]] for name, (kind, _) in members.items())]  # noqa: UP007


def _version() -> str:
    """Return versions, devices and extras: what a bug report needs."""
    import platform
    from importlib import metadata

    import torch
    from packaging.requirements import Requirement

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("Apple GPU")
    rows = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "devices": ", ".join([*devices, f"{os.cpu_count()} CPU cores"]),
    }
    requirements = [Requirement(text) for text in metadata.requires("medtokenbudget") or ()]
    for extra in ("serve", "onnx", "ray", "dicom", "hf"):
        packages = [one.name for one in requirements if one.marker and one.marker.evaluate({"extra": extra})]
        try:
            rows[f"extra {extra}"] = ", ".join(f"{package} {metadata.version(package)}" for package in packages)
        except metadata.PackageNotFoundError:
            rows[f"extra {extra}"] = f"not installed: pip install 'medtokenbudget[{extra}]'"
    column = max(map(len, rows)) + 2
    return "\n".join([f"mtb {__version__}", *(f"  {name:<{column}}{text}" for name, text in rows.items())])
