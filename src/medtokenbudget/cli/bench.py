"""`mtb bench`: the benchmarks of a source checkout."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.errors import RequestError, UnknownNameError


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "bench",
        "Run the benchmarks of the source checkout in this folder. They report ratios within one run.",
        "mtb bench routing statistics",
    )
    parser.add_argument("names", nargs="*", default=[], help="Benchmarks to run. Default: all of them.")
    options = parser.parse_args(arguments)

    sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec("benchmarks") is None:
        raise RequestError("The benchmarks are not part of the installed package. Run this in a clone of the repository.")
    from benchmarks.__main__ import ALL, run

    for name in options.names:
        if name not in ALL:
            raise UnknownNameError.of("benchmark", name, ALL)
    run(options.names or ALL)
    return 0
