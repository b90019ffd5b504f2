"""`mtb bench`: the speed of early routing on this machine, and the benchmarks of a source checkout."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.config import Count, Parallel
from medtokenbudget.errors import RequestError, UnknownNameError

EARLY = "early-routing"


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "bench",
        "Measure ratios within one run. early-routing, how much faster a routed backbone is on this machine, needs only the "
        "package; the others are those of the source checkout in this folder.",
        "mtb bench early-routing",
    )
    parser.add_argument("names", nargs="*", default=[], help="Benchmarks to run. Default: all of the source checkout.")
    parser.add_argument("--threads", type=Parallel, default=0, help="CPU threads of early-routing; 0 uses the default of PyTorch.")
    parser.add_argument("--rounds", type=Count, default=5, help="Measured rounds of early-routing.")
    options = parser.parse_args(arguments)
    if EARLY in options.names:
        _early_routing(options.threads, options.rounds)
        options.names.remove(EARLY)
        if not options.names:
            return 0

    sys.path.insert(0, str(Path.cwd()))
    if importlib.util.find_spec("benchmarks") is None:
        raise RequestError("The benchmarks are not part of the installed package. Run this in a clone of the repository.")
    from benchmarks.__main__ import ALL, run

    for name in options.names:
        if name not in ALL:
            raise UnknownNameError.of("benchmark", name, [EARLY, *ALL])
    run(options.names or ALL)
    return 0


def _early_routing(threads: int, rounds: int) -> None:
    import torch

    from medtokenbudget.experiments.early_speed import early_speed
    from medtokenbudget.features.pipeline import cpu_threads

    if rounds < 1 or threads < 0:
        raise RequestError("--rounds must be 1 or more, and --threads 0 or more.")
    with cpu_threads(threads):
        print(f"Early routing at budget 0.3, 224 pixels, {torch.get_num_threads()} CPU threads; x: speed over the dense pass.")
        for speed in early_speed(rounds=rounds):
            print(speed, flush=True)
