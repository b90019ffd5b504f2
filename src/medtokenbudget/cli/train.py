"""`mtb train`: one router and its head (none without class labels), evaluated and saved as a model."""

from __future__ import annotations

from typing import Literal

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.training_options import add_run, add_training, training_config
from medtokenbudget.config import DEFAULT_SELECTOR


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "train",
        "Train one router and its head on a store of tokens, evaluate it beside the controls `center` and `random`, and save "
        "it as a model. Without class labels the router learns from masks alone and has no head. If it is stopped, the same "
        "command resumes.",
        "mtb train isic.parquet --store tokens --out runs/first",
    )
    add_run(parser)
    parser.add_argument(
        "--head",
        type=Literal["auto", "none"],
        default="auto",
        help="'none' ignores class labels and trains the router from masks alone, for `mtb route`; so does 'auto' without labels.",
    )
    parser.add_argument("--selector", default=DEFAULT_SELECTOR, help="Selector to train: any that learns (docs/selectors.md).")
    add_training(parser, arguments, "lesion-first")
    options = parser.parse_args(arguments)

    from medtokenbudget.api import train
    from medtokenbudget.progress import say
    from medtokenbudget.runs.run import AS_IS, record_command
    from medtokenbudget.runs.sweep import require_complete

    config = training_config(options)
    run = train(options.manifest, options.store, options.out, config, options.selector, options.head)
    record_command(options.out, "train", arguments)
    ours = run.results[(run.results["method"] == run.info.main) & (run.results["view"] == AS_IS)]
    row = ours.iloc[int((ours["budget"] - 0.3).abs().to_numpy().argmin())]
    found = []
    if row["n"]:
        found.append(f"accuracy {row['accuracy']:.1%} (n = {row['n']})")
    if row["n_masked"]:
        found.append(f"{row['retention_of_ceiling']:.1%} of the lesion that fits the budget kept (n = {row['n_masked']})")
    say(f"{run.info.main} at budget {row['budget']:g}: {', '.join(found) or 'nothing to measure it on'}.")
    model = options.out / "model"
    following = f"mtb explore {model}" if run.info.classes else f"mtb route IMAGES --model {model} --out routed"
    say(f"Model saved in {model}. Next: mtb report {options.out} or {following}")
    require_complete(run.info)
    return 0
