"""`mtb reproduce`: the paper's studies under its own protocol, its numbers beside ours."""

from __future__ import annotations

import argparse
from typing import Any

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.training_options import add_engine, add_run, add_training, check_engine, training_config
from medtokenbudget.config import HEADLINE_SELECTORS, Folds, Seed
from medtokenbudget.errors import RequestError


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "reproduce",
        "Run the paper's studies (main, robustness, mask-free, signals, curriculum, toggles, kvasir, subset) and ours (epochs, "
        "center-bias, recipe, zoo, resplits), and print the paper's numbers next to ours. The same command resumes it.",
        "mtb reproduce isic.parquet --store tokens --out runs/paper --study main robustness",
    )
    add_run(parser)
    parser.add_argument(
        "--study",
        nargs="+",
        default=["all"],
        help="Studies to run; 'all' is every one that fits the data set, except zoo and resplits.",
    )
    section = parser.section("Study resplits")
    section.add_argument("--folds", type=Folds, default=None, help="Number of folds. Default: 5.")
    section.add_argument(
        "--seeds", nargs="+", type=Seed, default=None, help="Seeds of the trainings on each fold. Default: 42 43 44."
    )
    section.add_argument(
        "--methods",
        metavar="METHOD",
        nargs="+",
        default=None,
        help="Methods to compare. Default: " + " ".join(HEADLINE_SELECTORS) + ".",
    )
    add_engine(parser)
    add_training(parser, arguments, "paper", skip={"seed"}, protocol="paper")
    options = parser.parse_args(arguments)
    check_engine(options)

    chosen = {name: value for name in ("folds", "seeds", "methods") if (value := getattr(options, name)) is not None}
    if "resplits" in options.study:
        return _resplits(options, chosen)
    if chosen:
        raise RequestError(
            f"--{next(iter(chosen))} is an option of the study resplits; the other studies have seeds and methods of their own. "
            "Leave it out, or choose freely with mtb sweep."
        )

    from medtokenbudget.api import reproduce
    from medtokenbudget.experiments.run import record_command
    from medtokenbudget.experiments.summary import comparison
    from medtokenbudget.experiments.sweep import require_complete
    from medtokenbudget.progress import say

    run = reproduce(
        options.manifest,
        options.store,
        options.out,
        study=options.study,
        config=training_config(options),
        engine=options.engine,
        jobs=options.jobs,
        only=options.only,
        address=options.address,
    )
    record_command(options.out, "reproduce", arguments)
    print(comparison(run.results))
    say(f"{len(run.results)} rows in {options.out / 'results.csv'}. Next: mtb report {options.out}")
    require_complete(run.info)
    return 0


def _resplits(options: argparse.Namespace, chosen: dict[str, Any]) -> int:
    if options.study != ["resplits"]:
        raise RequestError("Study resplits makes its own splits, so it runs alone. Run the other studies with another --out.")

    from medtokenbudget.experiments.execution import Execution
    from medtokenbudget.experiments.resplits import resplits
    from medtokenbudget.experiments.run import RunInfo
    from medtokenbudget.experiments.sweep import require_complete
    from medtokenbudget.progress import say

    table = resplits(
        options.manifest,
        options.store,
        options.out,
        **chosen,
        config=training_config(options),
        execution=Execution(options.engine, options.jobs, options.only, options.address),
    )
    shown = table[table["metric"].isin(["accuracy", "balanced_accuracy", "retention_of_ceiling"])]
    print(shown.to_string(index=False, float_format=lambda value: f"{value:.4f}"))
    say(f"Variance between folds and seeds: {options.out / 'variance.csv'}. Each fold has a run directory of its own.")
    for fold in sorted(options.out.glob("fold-*")):
        require_complete(RunInfo.read(fold))
    return 0
