"""`mtb predict`: class probabilities and kept patches of images, to a table."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medtokenbudget.cli.parsing import command_parser


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "predict",
        "Class probabilities and kept patches of images, to a CSV or Parquet table. Files that cannot be read are listed in "
        "predictions.errors.jsonl beside predictions.csv and the rest goes on; the exit code is 1 only when none could be read.",
        "mtb predict runs/demo/model photos/ 'more/*.png' --budget 0.3 --out predictions.csv --overlay pictures",
    )
    parser.add_argument("model", help="Folder of a saved model, a run directory, or a hub id.")
    parser.add_argument("images", nargs="+", help="Image files, folders, globs, or a manifest (.parquet).")
    parser.add_argument("--budget", type=float, default=0.3, help="Share of the patches that is kept, in (0, 1].")
    parser.add_argument("--out", type=Path, required=True, help="The table: FILE.csv or FILE.parquet.")
    parser.add_argument("--tokens", type=Path | None, default=None, help="Also write the kept tokens to this safetensors file.")
    parser.add_argument("--tokens_dtype", type=Literal["fp16", "fp32"], default="fp16", help="Number format of the tokens.")
    parser.add_argument("--overlay", type=Path | None, default=None, help="Also write a picture of each image to this folder.")
    parser.add_argument("--selector", default="lats", help="Selector, with its own trained head.")
    parser.add_argument("--weights", type=Path | None, default=None, help="Where the backbone's weights lie on this machine.")
    parser.add_argument("--batch_size", type=int, default=16, help="Images in one forward pass.")
    parser.add_argument("--workers", type=int, default=2, help="Threads that decode images.")
    parser.add_argument("--device", default="auto", help="'auto' takes a GPU when there is one; else 'cpu', 'cuda', ...")
    options = parser.parse_args(arguments)

    from medtokenbudget.app.predict import predict_files
    from medtokenbudget.model import load
    from medtokenbudget.progress import say

    model = load(options.model, weights=options.weights, device=options.device)
    summary = predict_files(
        model,
        options.images,
        options.out,
        budget=options.budget,
        selector=options.selector,
        tokens=options.tokens,
        tokens_dtype=options.tokens_dtype,
        overlays=options.overlay,
        batch_size=options.batch_size,
        workers=options.workers,
    )
    if summary.failed:
        say(f"{summary.failed} of {summary.done + summary.failed} images could not be read; the reasons are in {summary.errors}.")
    say(f"{summary.done} images: {options.out}" + (f", pictures in {options.overlay}" if options.overlay else "") + ".")
    return 0
