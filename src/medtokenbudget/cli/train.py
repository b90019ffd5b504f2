"""`mtb train`: one LATS router and its head, evaluated and saved as a model."""

from __future__ import annotations

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.training_options import add_run, add_training, training_config


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "train",
        "Train one LATS router and its head on a store of tokens, evaluate it beside the controls `center` and `random`, and save "
        "it as a model. If it is stopped, the same command resumes.",
        "mtb train isic.parquet --store tokens --out runs/first",
    )
    add_run(parser)
    add_training(parser, arguments, "lesion-first")
    options = parser.parse_args(arguments)

    from medtokenbudget.api import train
    from medtokenbudget.experiments.results import AS_IS
    from medtokenbudget.experiments.run import record_command
    from medtokenbudget.experiments.sweep import require_complete
    from medtokenbudget.progress import say

    run = train(options.manifest, options.store, options.out, training_config(options))
    record_command(options.out, "train", arguments)
    ours = run.results[(run.results["method"] == run.info.main) & (run.results["view"] == AS_IS)]
    row = ours.iloc[int((ours["budget"] - 0.3).abs().to_numpy().argmin())]
    kept = ""
    if row["n_masked"]:
        kept = f", {row['retention_of_ceiling']:.1%} of the lesion that fits the budget kept (n = {row['n_masked']})"
    say(f"{run.info.main} at budget {row['budget']:g}: accuracy {row['accuracy']:.1%} (n = {row['n']}){kept}.")
    say(f"Model saved in {options.out / 'model'}. Next: mtb report {options.out} or mtb explore {options.out / 'model'}")
    require_complete(run.info)
    return 0
