"""`mtb export`: ONNX files at fixed budgets, or a folder for the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medtokenbudget.cli.parsing import command_parser


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "export",
        "Write a model for use elsewhere: ONNX (one file per budget, checked against PyTorch before it appears), or a folder that "
        "names no path of this machine, ready for the hub.",
        "mtb export runs/demo/model --format onnx --budget 0.1 0.3 --part whole --out exported",
    )
    parser.add_argument("model", help="Folder of a saved model, a run directory, or a hub id.")
    parser.add_argument("--format", type=Literal["onnx", "hub"], default="onnx", help="What to write.")
    parser.add_argument("--out", type=Path, required=True, help="Folder to write to.")
    parser.add_argument("--budget", type=float, nargs="+", default=[0.3], help="Budgets, one ONNX file each.")
    parser.add_argument(
        "--part", type=Literal["routing", "whole"], default="whole", help="'routing': tokens to logits; 'whole': image to logits."
    )
    parser.add_argument("--selector", default="lats", help="Selector, with its own trained head.")
    parser.add_argument("--weights", type=Path | None, default=None, help="Where the backbone's weights lie on this machine.")
    parser.add_argument("--push", default=None, help="With --format hub: also upload to this hub id, as a private repository.")
    options = parser.parse_args(arguments)

    from medtokenbudget.errors import RequestError
    from medtokenbudget.model import load
    from medtokenbudget.progress import say

    if options.push and options.format != "hub":
        raise RequestError("--push goes with --format hub.")
    model = load(options.model, weights=options.weights, device="cpu")
    if options.format == "hub":
        say(f"{model.save_pretrained(options.out, portable=True)} is ready; load it with mtb.load.")
        if options.push:
            say(f"Uploaded to {model.push_to_hub(options.push)}.")
        return 0
    from medtokenbudget.model.onnx import export_onnx

    for budget in options.budget:
        path = export_onnx(model, options.out, budget, options.part, options.selector)
        say(f"{path}: checked against PyTorch, {path.stat().st_size / 1024**2:.1f} MB.")
    return 0
