"""The command `mtb`. Thin: each command's module reads its arguments and calls one public function.

The table below is all that `mtb --help` needs, so that it answers at once; a command's own module is imported when it is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from medtokenbudget.errors import MedTokenBudgetError, UnknownNameError

COMMANDS: dict[str, str] = {
    "demo": "the whole story on drawn images, offline, on a CPU: draw, extract, train, sweep, report",
    "data": "make a manifest from a data set (isic, kvasir, folder, csv, synthetic), split it, check it",
    "extract": "run the frozen backbone once and fill a store of tokens",
    "distill": "make a small backbone from a large one",
    "train": "train one LATS router and its head",
    "sweep": "methods x budgets x seeds",
    "reproduce": "the paper's studies, its numbers beside ours",
    "report": "tables, figures and a page from the results of a run",
    "predict": "class probabilities and kept patches of images",
    "serve": "JSON API and explorer page of a trained model",
    "explore": "the explorer page, opened in the browser",
    "export": "ONNX files or a folder for the hub",
    "bench": "measure this machine, as ratios within one run",
    "doctor": "what this machine has and lacks",
}


def _usage() -> str:
    rows = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items() if _exists(name))
    return (
        "usage: mtb COMMAND ...\n\nLesion-preserving token routing for dermoscopic images.\n\n"
        f"commands:\n{rows}\n\n"
        "`mtb COMMAND --help` explains a command. Research software, not a medical device."
    )


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"{__name__}.{name}") is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 done, 1 the work failed, 2 the request was wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        from medtokenbudget import __version__

        print(f"mtb {__version__}")
        return 0
    try:
        return _run(arguments[0], arguments[1:])
    except MedTokenBudgetError as error:
        print(f"mtb: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nmtb: stopped. The same command goes on from here.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS or not _exists(name):
        raise UnknownNameError.of("command", name, [known for known in COMMANDS if _exists(known)])
    module = importlib.import_module(f"{__name__}.{name}")
    return int(module.main(arguments) or 0)
