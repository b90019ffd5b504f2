"""`mtb evaluate`: external validation of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.config import HEADLINE_BUDGETS, Budget


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "evaluate",
        "Evaluate a saved model on images that it was not trained on, with masks, labels, both or neither, beside the controls "
        "center, darkness, random and oracle, and write a report: retention and classification with intervals, strata, "
        "calibration, the worst images, and how much was lost against the model's own validation.",
        "mtb evaluate runs/first other.parquet --out runs/external",
    )
    parser.add_argument("model", help="Run directory, model folder, hub id (owner/name), or 'dermoscopy'.")
    parser.add_argument("manifest", type=Path, help="The images (.parquet), made with `mtb data`.")
    parser.add_argument("--out", type=Path, required=True, help="Run directory to write.")
    parser.add_argument("--store", type=Path | None, default=None, help="Tokens of the images. Default: extract them.")
    parser.add_argument(
        "--budgets", type=tuple[Budget, ...], default=HEADLINE_BUDGETS, help="Shares of the patches to keep, such as 0.1 0.3 0.5."
    )
    parser.add_argument("--selector", type=str | None, default=None, help="Method of the model. Default: its main method.")
    parser.add_argument(
        "--classes",
        type=Path | None,
        default=None,
        help="JSON file from classes of the data to classes of the model where their names differ; it can also leave classes out.",
    )
    parser.add_argument(
        "--part",
        type=Literal["auto", "val", "select", "train", "all"],
        default="auto",
        help="Images to evaluate. auto: the validation images of the manifest that the model was trained with, all of others.",
    )
    parser.add_argument("--pictures", type=bool, default=True, help="'false' leaves images of the data set out of the report.")
    options = parser.parse_args(arguments)

    from medtokenbudget.api import evaluate
    from medtokenbudget.progress import say
    from medtokenbudget.runs.run import headline, record_command

    run = evaluate(
        options.model,
        options.manifest,
        options.out,
        store=options.store,
        budgets=options.budgets,
        selector=options.selector,
        classes=options.classes,
        part=options.part,
    )
    record_command(options.out, "evaluate", arguments)
    print(headline(run.results))
    say(f"Wrote {run.report(pictures=options.pictures)}.")
    return 0
