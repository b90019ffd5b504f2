"""`mtb sweep`: any methods x budgets x seeds."""

from __future__ import annotations

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.training_options import add_engine, add_run, add_training, check_engine, training_config
from medtokenbudget.config import DEFAULT_METHODS, Seed


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "sweep",
        "Train and evaluate methods x budgets x seeds. If it is stopped, the same command resumes.",
        "mtb sweep isic.parquet --store tokens --out runs/sweep --methods lats:lesion-first random center --seeds 42 43 44",
    )
    add_run(parser)
    parser.add_argument(
        "--methods",
        metavar="METHOD",
        nargs="+",
        default=None,
        help="Methods as selector, selector:variant or selector+head:variant, such as lats:lesion-first. Default: "
        + " ".join(DEFAULT_METHODS)
        + ".",
    )
    parser.add_argument(
        "--heads",
        metavar="HEAD",
        nargs="+",
        default=None,
        help="Heads to combine every method with, such as mlp abmil. A method that names its head, as selector+head, keeps it.",
    )
    parser.add_argument("--seeds", nargs="+", type=Seed, default=[42], help="Random seeds. Every method is trained once per seed.")
    add_engine(parser)
    add_training(parser, arguments, "lesion-first", skip={"seed"})
    options = parser.parse_args(arguments)
    check_engine(options)

    from medtokenbudget.api import sweep
    from medtokenbudget.progress import say
    from medtokenbudget.runs.run import record_command
    from medtokenbudget.runs.sweep import require_complete

    config = training_config(options)
    run = sweep(
        options.manifest,
        options.store,
        options.out,
        methods=options.methods,
        seeds=options.seeds,
        config=config,
        engine=options.engine,
        jobs=options.jobs,
        address=options.address,
        heads=options.heads,
    )
    record_command(options.out, "sweep", arguments)
    say(f"{len(run.results)} rows in {options.out / 'results.csv'}. Next: mtb report {options.out}")
    require_complete(run.info)
    return 0
