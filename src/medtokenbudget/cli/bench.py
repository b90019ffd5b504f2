"""`mtb bench`: the benchmarks of the source checkout, as ratios within one run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.errors import RequestError, UnknownNameError


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "bench",
        "Run benchmarks of the source checkout in this folder; figures are ratios within one run.",
        "mtb bench routing statistics",
    )
    parser.add_argument("names", nargs="*", default=[], help="Benchmarks to run; none means all of them.")
    options = parser.parse_args(arguments)

    sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec("benchmarks") is None:
        raise RequestError("the benchmarks are in the source checkout, not in the package: run this in a clone, or `make bench`.")
    from benchmarks.__main__ import ALL, run

    for name in options.names:
        if name not in ALL:
            raise UnknownNameError.of("benchmark", name, ALL)
    run(options.names or ALL)
    return 0
