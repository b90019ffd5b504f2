"""`mtb export`: ONNX files at fixed budgets, or a folder for the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medtokenbudget.cli.parsing import command_parser
from medtokenbudget.config import Budget


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "export",
        "Export a model as ONNX (one file per budget, compared with PyTorch before it is written), or as a folder without local "
        "paths that is ready for the hub.",
        "mtb export runs/demo --format onnx --budget 0.1 0.3 --part whole --out exported",
    )
    parser.add_argument("model", help="Run directory, model folder or hub id (owner/name).")
    parser.add_argument("--out", type=Path, required=True, help="Folder to write to.")
    parser.add_argument("--format", type=Literal["onnx", "hub"], default="onnx", help="ONNX files, or a model folder for the hub.")
    parser.add_argument("--budget", type=Budget, nargs="+", default=[0.3], help="Budgets, one ONNX file each.")
    parser.add_argument(
        "--part", type=Literal["routing", "whole"], default="whole", help="'whole': image to logits; 'routing': tokens to logits."
    )
    parser.add_argument(
        "--selector",
        type=str | None,
        default=None,
        help="Method to export as ONNX. Default: the model's main method. The model's README.md lists all of them.",
    )
    parser.add_argument(
        "--weights",
        type=Path | None,
        default=None,
        help="Weights of the backbone, if they are not where the model expects them.",
    )
    parser.add_argument(
        "--push", type=str | None, default=None, help="With --format hub: also upload to this hub id, as a private repository."
    )
    options = parser.parse_args(arguments)

    from medtokenbudget.errors import RequestError
    from medtokenbudget.model import load
    from medtokenbudget.progress import say

    if options.push and options.format != "hub":
        raise RequestError("--push needs --format hub.")
    model = load(options.model, weights=options.weights, device="cpu")
    if options.format == "hub":
        say(f"Wrote the model to {model.save_pretrained(options.out, portable=True)}. Load it with mtb.load.")
        if options.push:
            say(f"Uploaded it to {model.push_to_hub(options.push)}.")
        return 0
    from medtokenbudget.model.onnx import export_onnx

    for budget in options.budget:
        path = export_onnx(model, options.out, budget, options.part, options.selector)
        say(f"Wrote {path} ({path.stat().st_size / 1024**2:.1f} MB), checked against PyTorch.")
    return 0
