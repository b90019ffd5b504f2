"""The command `mtb`. Each command is a thin function that reads its options and calls one public function.

`mtb --help` needs only the table below, so that it answers at once. The chapter of a command is imported when it is called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence

from medtokenbudget.config import NOTICE
from medtokenbudget.errors import MedTokenBudgetError, UnknownNameError

COMMANDS: dict[str, str] = {
    "demo": "take a tour on drawn images, offline and on a CPU: ready-made router, training, sweep, report",
    "data": "make a manifest of a data set (ISIC 2019, Kvasir v2, folders, CSV, drawn images), split it, check it",
    "extract": "run the frozen backbone once and store the patch tokens",
    "store": "show what is inside a store of tokens",
    "train": "train a router and its head, and save them as a model",
    "sweep": "train and evaluate several methods at several budgets and seeds",
    "reproduce": "run the paper's studies and compare with its numbers",
    "report": "write the tables, figures and report.html of a run, or compare several runs",
    "route": "write which patches of images a router keeps, with no training at all",
    "evaluate": "evaluate a saved model on other images: external validation with a report",
    "calibrate": "let a model keep a promised share of the lesion instead of a share of the patches",
    "predict": "write class probabilities and kept patches of images to a table",
    "serve": "serve a model: JSON API and explorer page",
    "explore": "serve a model and open the explorer in the browser",
    "export": "export a model as ONNX files, as a static site or as a folder for the hub",
    "completion": "print a script that completes commands and options in the shell",
}
CHAPTERS = {
    "data": ("data",),
    "learn": ("extract", "train", "sweep", "reproduce", "calibrate"),
    "use": ("route", "predict", "evaluate", "serve", "explore", "export"),
    "show": ("demo", "report", "store", "completion"),
}
"""Where the function of each command is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after `mtb`; None takes them from the process.

    Returns:
        The exit code: 0 for success, 1 if the work failed, 2 if the request was wrong.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except MedTokenBudgetError as error:
        print(f"mtb: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nmtb: Stopped. Run the same command again to continue.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MemoryError:
        print("mtb: Out of memory. Close other programs, or use fewer workers or jobs or a smaller batch.", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"mtb: {where}{error.strerror or error}. Check the disk, the permissions and `ulimit -n`.", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), flush=True)
        return 0
    if arguments[0] == "--version":
        print(_version(), flush=True)
        return 0
    return int(command(arguments[0])(arguments[1:]) or 0)


def command(name: str) -> Callable[[list[str]], int]:
    """The function that runs a command.

    Raises:
        UnknownNameError: There is no such command.
    """
    if name not in COMMANDS:
        raise UnknownNameError.of("command", name, COMMANDS)
    chapter = next(chapter for chapter, names in CHAPTERS.items() if name in names)
    run: Callable[[list[str]], int] = getattr(importlib.import_module(f"{__name__}.{chapter}"), name)
    return run


def _version() -> str:
    """Versions, devices and extras: what a bug report needs."""
    import platform

    import torch

    from medtokenbudget import __version__

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("Apple GPU")
    rows = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "devices": ", ".join([*devices, f"{os.cpu_count()} CPU cores"]),
        **{f"extra {name}": _extra(name, packages) for name, packages in _extras().items()},
    }
    column = max(map(len, rows)) + 2
    return "\n".join([f"mtb {__version__}", *(f"  {name:<{column}}{text}" for name, text in rows.items())])


def _extras() -> dict[str, list[str]]:
    """The packages of every extra that users install, from the metadata of this installation."""
    from packaging.requirements import Requirement

    extras: dict[str, list[str]] = {}
    for text in importlib.metadata.requires("medtokenbudget") or ():
        requirement = Requirement(text)
        for name in ("serve", "onnx", "ray", "dicom"):
            if requirement.marker and requirement.marker.evaluate({"extra": name}):
                extras.setdefault(name, []).append(requirement.name)
    return extras


def _extra(name: str, packages: Sequence[str]) -> str:
    try:
        return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed: pip install 'medtokenbudget[{name}]'"


def _help() -> str:
    from medtokenbudget.cli.options import command_list

    return command_list(
        "mtb COMMAND ...",
        "Lesion-preserving token routing for dermoscopic images.",
        COMMANDS,
        f"Run `mtb COMMAND --help` for the options of a command. {NOTICE}",
    )
