"""`mtb reproduce`: the paper's studies under its own protocol, its numbers beside ours."""

from __future__ import annotations

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.training_options import add_engine, add_run, add_training, check_engine, training_config


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "reproduce",
        "Run the paper's studies (main, robustness, mask-free, signals, curriculum, toggles, kvasir, subset) and ours (epochs, "
        "center-bias, recipe, zoo), and print the paper's numbers next to ours. The same command resumes it.",
        "mtb reproduce isic.parquet --store tokens --out runs/paper --study main robustness",
    )
    add_run(parser)
    parser.add_argument(
        "--study",
        nargs="+",
        default=["all"],
        help="Studies to run; 'all' is every one that fits the data set, except zoo.",
    )
    add_engine(parser)
    add_training(parser, arguments, "paper", skip={"seed"}, protocol="paper")
    options = parser.parse_args(arguments)
    check_engine(options)

    from medtokenbudget.api import reproduce
    from medtokenbudget.progress import say
    from medtokenbudget.runs.paper import comparison
    from medtokenbudget.runs.run import record_command
    from medtokenbudget.runs.sweep import require_complete

    run = reproduce(
        options.manifest,
        options.store,
        options.out,
        study=options.study,
        config=training_config(options),
        engine=options.engine,
        jobs=options.jobs,
        address=options.address,
    )
    record_command(options.out, "reproduce", arguments)
    print(comparison(run.results))
    say(f"{len(run.results)} rows in {options.out / 'results.csv'}. Next: mtb report {options.out}")
    require_complete(run.info)
    return 0
