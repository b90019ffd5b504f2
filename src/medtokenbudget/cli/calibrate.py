"""`mtb calibrate`: a guarantee instead of a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.cli.values import share
from medtokenbudget.config import Budget


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "calibrate",
        "Pick the threshold with which a model keeps a promised share of the lesion, by conformal risk control on images with "
        "masks that it was not trained on, and save it in the model. `mtb predict`, `mtb route` and the explorer then take "
        "--retention instead of a budget: small lesions get few tokens, large ones many.",
        "mtb calibrate runs/first photos.parquet --store tokens --retention 0.95",
    )
    parser.add_argument("model", help="Run directory, model folder or hub id (owner/name).")
    parser.add_argument("manifest", type=Path, help="Images with masks (.parquet); their groups are the exchangeable units.")
    parser.add_argument("--retention", type=share, required=True, help="Share of the lesion to promise, such as 0.95 or 95%.")
    parser.add_argument(
        "--coverage",
        type=share,
        default=None,
        help="Promise the retention in this share of the images, such as 0.9. Default: on average.",
    )
    parser.add_argument(
        "--cap", type=Budget | None, metavar="SHARE", default=None, help="Largest share of the patches that an image may keep."
    )
    parser.add_argument("--store", type=Path | None, default=None, help="Tokens of the images. Default: extract them.")
    parser.add_argument("--selector", type=str | None, default=None, help="Method to calibrate. Default: the model's main method.")
    parser.add_argument(
        "--part",
        type=Literal["auto", "val", "select", "train", "all"],
        default="auto",
        help="Images to calibrate on. auto: the validation images of the manifest that the model was trained with, all of others.",
    )
    parser.add_argument(
        "--out", type=Path | None, default=None, help="Folder for a calibrated copy. Default: save it in the model folder."
    )
    options = parser.parse_args(arguments)

    from medtokenbudget.api import calibrate
    from medtokenbudget.progress import say

    found = calibrate(
        options.model,
        options.manifest,
        options.retention,
        coverage=options.coverage,
        cap=options.cap,
        store=options.store,
        selector=options.selector,
        part=options.part,
        out=options.out,
    )
    say(
        f"{found.selector} keeps {found}, on images like the {found.images:,} of “{found.dataset}” ({found.groups:,} groups). "
        f"There {found.tokens:.1f} patches on average (a score of {found.threshold:.4g} or more) keep {found.kept:.1%}."
    )
    where = options.out or options.model
    asked = f"--retention {found.retention:g}" + ("" if found.coverage is None else f" --coverage {found.coverage:g}")
    say(f"Saved in {where}. Next: mtb predict {where} IMAGES {asked} --out predictions.csv")
    return 0
