"""`mtb sweep`: any methods x budgets x seeds."""

from __future__ import annotations

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.training_options import add_engine, add_run, add_training, execution, training_config
from medtokenbudget.config import DEFAULT_METHODS


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "sweep",
        "Train and evaluate methods x budgets x seeds. One unit per method and seed; a second call goes on where it stopped.",
        "mtb sweep isic.parquet --store tokens --out runs/sweep --methods lats random center --seeds 42 43 44",
    )
    add_run(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=None,
        help="Methods as selector or selector:variant, such as lats:lesion-first. Default: " + " ".join(DEFAULT_METHODS) + ".",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[42], help="Seeds; each gives one unit per method.")
    add_engine(parser)
    add_training(parser, arguments, "lesion-first")
    options = parser.parse_args(arguments)

    from medtokenbudget.api.train import save_model
    from medtokenbudget.experiments import sweep
    from medtokenbudget.experiments.run import record_command
    from medtokenbudget.progress import say

    config = training_config(options)
    results = sweep(
        options.manifest,
        options.store,
        options.out,
        methods=options.methods,
        budgets=config.budgets,
        seeds=options.seeds,
        config=config,
        execution=execution(options),
    )
    record_command(options.out, "sweep", arguments)
    save_model(options.out)
    say(f"{len(results)} cells: {options.out / 'results.csv'}. Next: mtb report {options.out}")
    return 0
