"""`mtb predict`: class probabilities and kept patches of images, to a table."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medtokenbudget.cli.amount import add_amount, amount_of
from medtokenbudget.cli.model_pass import add_pass
from medtokenbudget.cli.parsing import command_parser, require_effect


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "predict",
        "Write class probabilities and kept patches of images to a CSV or Parquet table. Files that cannot be read are listed in "
        "predictions.errors.jsonl next to predictions.csv; the exit code is 1 only if no image could be read.",
        "mtb predict runs/demo photos/ 'more/*.png' --budget 0.3 --out predictions.csv --overlay overlays",
    )
    parser.add_argument("model", help="Run directory, model folder or hub id (owner/name).")
    parser.add_argument("images", nargs="+", help="Image files, folders, globs, or a manifest (.parquet).")
    parser.add_argument("--out", type=Path, required=True, help="Table to write, FILE.csv or FILE.parquet.")
    add_amount(parser)
    parser.add_argument(
        "--selector",
        type=str | None,
        default=None,
        help="Method to predict with. Default: the model's main method. The model's README.md lists all of them.",
    )
    parser.add_argument(
        "--overlay", type=Path | None, default=None, help="Also draw the kept patches of each image to this folder."
    )
    parser.add_argument("--tokens", type=Path | None, default=None, help="Also write the kept tokens to this safetensors file.")
    parser.add_argument("--tokens_dtype", type=Literal["fp16", "fp32"], default="fp16", help="Number format of the tokens.")
    add_pass(parser)
    options = parser.parse_args(arguments)
    require_effect(options, options.tokens is not None, "--tokens", "tokens_dtype")

    from medtokenbudget.model import load
    from medtokenbudget.model.batch import predict_files
    from medtokenbudget.progress import say

    model = load(options.model, weights=options.weights, device=options.device)
    summary = predict_files(
        model,
        options.images,
        options.out,
        budget=amount_of(options, model, options.selector),
        selector=options.selector,
        tokens=options.tokens,
        tokens_dtype=options.tokens_dtype,
        overlays=options.overlay,
        batch_size=options.batch_size,
        workers=options.workers,
    )
    if summary.failed:
        say(f"{summary.failed} of {summary.done + summary.failed} images could not be read. The reasons are in {summary.errors}.")
    where = f" and overlays to {options.overlay}" if options.overlay else ""
    say(f"Wrote {summary.done} predictions of {options.selector or model.main} to {options.out}{where}.")
    return 0
