"""`mtb train`: one LATS router and its head, evaluated and saved as a model."""

from __future__ import annotations

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.training_options import add_run, add_training, training_config


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "train",
        "Train one LATS router and its head on a store of tokens, evaluate it beside the controls `center` and `random`, and save "
        "it as a model. Stopped at any point, the same command goes on.",
        "mtb train isic.parquet --store tokens --out runs/first",
    )
    add_run(parser)
    add_training(parser, arguments, "lesion-first")
    options = parser.parse_args(arguments)

    from medtokenbudget.api.train import train
    from medtokenbudget.experiments.run import record_command
    from medtokenbudget.progress import say

    results = train(options.manifest, options.store, options.out, training_config(options))
    record_command(options.out, "train", arguments)
    ours = results[(results["method"] == results["method"].iloc[0]) & (results["view"] == "as-is")]
    row = ours.iloc[int((ours["budget"] - 0.3).abs().to_numpy().argmin())]
    kept = "" if row["n_masked"] == 0 else f", keeps {row['retention_of_ceiling']:.1%} of the lesion that fits"
    say(f"at budget {row['budget']:g}: accuracy {row['accuracy']:.1%} on {row['n']} validation images{kept}.")
    say(f"model: {options.out / 'model'}. Next: mtb report {options.out}, mtb explore {options.out / 'model'}")
    return 0
