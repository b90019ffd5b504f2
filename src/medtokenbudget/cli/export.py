"""`mtb export`: ONNX files at fixed budgets, a site that runs in the browser without a server, or a folder for the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medtokenbudget.cli.parsing import command_parser, require_effect
from medtokenbudget.config import Budget

if TYPE_CHECKING:
    from medtokenbudget.model import MedTokenBudget


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "export",
        "Export a model as ONNX (one file per budget, compared with PyTorch before it is written), as a static site that runs the "
        "model in the browser, or as a folder without local paths that is ready for the hub.",
        "mtb export runs/demo --format onnx --budget 0.1 0.3 --part whole --out exported",
    )
    parser.add_argument(
        "model", nargs="?", default=None, help="Run directory, model folder or hub id (owner/name). Default: the packaged router."
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder to write to.")
    parser.add_argument(
        "--format",
        type=Literal["onnx", "web", "hub"],
        default="onnx",
        help="ONNX files, the explorer as a static site, or a model folder for the hub.",
    )
    parser.add_argument(
        "--budget", type=Budget, nargs="+", default=None, help="Budgets, one ONNX file each. Default: 0.3, or that of the model."
    )
    parser.add_argument(
        "--part",
        type=Literal["routing", "whole"],
        default="whole",
        help="'whole': image to logits; 'routing': tokens to logits.",
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
        "--push",
        type=str | None,
        metavar="OWNER/NAME",
        default=None,
        help="With --format hub: also upload to this hub id, as a private repository.",
    )
    parser.add_argument(
        "--runtime",
        type=Path | None,
        default=None,
        help="With --format web: folder of the npm package onnxruntime-web. Default: fetched by npm, once.",
    )
    options = parser.parse_args(arguments)
    require_effect(options, options.format == "onnx", "--format onnx", "budget", "part", "selector")

    from medtokenbudget.errors import RequestError
    from medtokenbudget.model import load
    from medtokenbudget.progress import say

    if options.push and options.format != "hub":
        raise RequestError("--push needs --format hub.")
    if options.format != "web" and options.runtime:
        raise RequestError("--runtime needs --format web.")
    if options.model is None:
        say("No model given. Using the router for dermoscopic images that comes with the package; it predicts no class.")
    model = load(options.model or "dermoscopy", weights=options.weights, device="cpu")
    if options.format == "hub":
        say(f"Wrote the model to {model.save_pretrained(options.out)}. Load it with mtb.load.")
        if options.push:
            say(f"Uploaded it to {model.push_to_hub(options.push)}.")
        return 0
    if options.format == "web":
        return _web(model, options.model, options.out, options.runtime)
    from medtokenbudget.model.onnx import export_onnx

    for budget in options.budget or [model.budget(None)]:
        path = export_onnx(model, options.out, budget, options.part, options.selector)
        say(f"Wrote {path} ({path.stat().st_size / 1024**2:.1f} MB), checked against PyTorch.")
    return 0


def _web(model: MedTokenBudget, name: str | None, out: Path, runtime: Path | None) -> int:
    from medtokenbudget.progress import say
    from medtokenbudget.serve.service import is_demo
    from medtokenbudget.serve.site import find_runtime, write_site

    graphs = write_site(model, out, find_runtime(runtime), name is not None and is_demo(name))
    for method, why in graphs.left_out.items():
        say(f"Left out method '{method}': {why}.")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(f"Wrote the site to {out} ({size / 1e6:.1f} MB), checked against PyTorch. To see it: python -m http.server -d {out}")
    return 0
