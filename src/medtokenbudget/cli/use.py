"""Commands that use a model: `route`, `predict`, `evaluate`, `serve`, `explore`, `export`."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from medtokenbudget.cli.options import CommandParser, add_config, command_parser, pick, require_effect, share
from medtokenbudget.config import DEFAULT_BUDGET, HEADLINE_BUDGETS, Budget, Count, Natural, Parallel, ServeConfig
from medtokenbudget.errors import RequestError

if TYPE_CHECKING:
    from medtokenbudget.model import Guarantee, MedTokenBudget


def route(arguments: list[str]) -> int:
    parser = command_parser(
        "route",
        "Write which patches of images a router keeps, and their scores, to a table in a folder. The default model is a router for "
        "dermoscopic images that comes with the package, so nothing has to be trained. Files that cannot be read are listed in "
        "errors.jsonl; the exit code is 1 only if no image could be read, or no mask could be used. The same command again "
        "replaces the results, or goes on where it was stopped if the table is made in shards.",
        "mtb route photos/ 'more/*.png' --budget 0.3 --overlay --out routed",
    )
    parser.add_argument("images", nargs="+", help="Image files, folders, globs, or a manifest (.parquet).")
    parser.add_argument("--out", type=Path, required=True, help="Folder to write.")
    add_amount(parser)
    parser.add_argument(
        "--model", default="dermoscopy", help="'dermoscopy', a run directory, a model folder or a hub id (owner/name)."
    )
    parser.add_argument(
        "--masks",
        type=Path | None,
        default=None,
        help="Folder with lesion masks (a.png, a_segmentation.png or a_mask.png for a.jpg), to measure how much is kept.",
    )
    parser.add_argument("--overlay", action="store_true", help="Also draw the kept patches of each image, in overlays/.")
    parser.add_argument("--tokens", action="store_true", help="Also write the kept tokens, to tokens.safetensors.")
    parser.add_argument("--tokens_dtype", type=Literal["fp16", "fp32"], default="fp16", help="Number format of the tokens.")
    parser.add_argument("--table", type=Literal["parquet", "csv"], default="parquet", help="Format of the table.")
    parser.add_argument("--selector", type=str | None, default=None, help="Method to route with. Default: the model's main method.")
    add_pass(parser)
    many = parser.section("Many images")
    many.add_argument(
        "--shard_size",
        type=Natural,
        default=0,
        help="Images per file of a table in shards (routes/), which a stopped command goes on with. 0: one table; 1000 on Ray.",
    )
    many.add_argument("--engine", type=Literal["local", "ray"], default="local", help="Where to run: on this machine or on Ray.")
    many.add_argument("--address", type=str | None, default=None, help="Address of a running Ray cluster: auto or host:port.")
    options = parser.parse_args(arguments)

    from medtokenbudget.model import load
    from medtokenbudget.model.batch import RouteConfig, Routed, route_files
    from medtokenbudget.progress import say

    require_effect(options, options.engine == "ray", "--engine ray", "address")
    require_effect(options, options.tokens, "--tokens", "tokens_dtype")
    model = load(options.model, weights=options.weights, device=options.device)
    options.budget = amount_of(options, model, options.selector)
    routed: Routed = route_files(
        options.images, options.out, model, options.masks, pick(options, RouteConfig), options.engine, options.address
    )
    written = routed.written
    if written.failed:
        say(f"{written.failed} of {written.done + written.failed} images could not be read. The reasons are in {written.errors}.")
    if written.unfamiliar:
        say(
            f"{written.unfamiliar} of {written.done} images are unlike the training images of this model (column `unfamiliar`): "
            "do not rely on what was kept of them."
        )
    if routed.retention and routed.retention["router"].n:
        promised = options.retention is not None
        print(_measured(routed, f"promised {options.retention:g}" if promised else f"budget {options.budget:g}"))
    say(f"Routed {written.done:,} image{'' if written.done == 1 else 's'} to {routed.table}.")
    return 0


def _measured(routed: object, amount: str) -> str:
    from medtokenbudget.model.batch import Routed

    assert isinstance(routed, Routed)
    names = {"router": "router", "center": "center (control)", "random": "random (expected)"}
    n = routed.retention["router"].n
    head = f"{f'{amount}, n = {n}':<22}{'pooled':>10}{'mean':>10}{'of ceiling':>12}"
    rows = [
        f"{names[name]:<22}{found.pooled:>10.1%}{found.mean:>10.1%}{found.of_ceiling:>12.1%}"
        for name, found in routed.retention.items()
    ]
    return "\n".join([head, *rows])


def predict(arguments: list[str]) -> int:
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


def evaluate(arguments: list[str]) -> int:
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


SUMMARIES = {
    "serve": "Serve a model: the explorer page for the browser, and the same as a JSON API (POST /v1/route).",
    "explore": "Serve a model and open its explorer page in the browser. The same as `mtb serve`, plus the browser.",
}


def serve(arguments: list[str], name: str = "serve", open_browser: bool = False) -> int:
    summary = f"{SUMMARIES[name]} Only this machine can connect, unless you set --host and a token."
    parser = command_parser(name, summary, f"mtb {name} runs/demo/model --port 8765")
    parser.add_argument(
        "model",
        nargs="?",
        default=None,
        help="Folder of a saved model, a run directory, or a hub id. Default: the dermoscopy router of the package.",
    )
    add_config(parser, ServeConfig, "Limits", first={"host", "port", "token_file", "weights", "device"})
    options = parser.parse_args(arguments)

    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"The server needs {', '.join(missing)}. Run `pip install 'medtokenbudget[serve]'`.")

    from medtokenbudget.serve.server import serve

    serve(options.model, pick(options, ServeConfig), open_browser)
    return 0


def explore(arguments: list[str]) -> int:
    return serve(arguments, name="explore", open_browser=True)


def export(arguments: list[str]) -> int:
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
        "--budget",
        type=Budget,
        nargs="+",
        default=None,
        help=f"Budgets, one ONNX file each. Default: {DEFAULT_BUDGET} or the model's.",
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


def add_amount(parser: CommandParser) -> None:
    """Add --budget, --retention and --coverage."""
    parser.add_argument(
        "--budget",
        type=Budget | None,
        default=None,
        help=f"Share of the patches to keep, as 0.3 or 30%. Default: {DEFAULT_BUDGET}.",
    )
    parser.add_argument(
        "--retention",
        type=share,
        default=None,
        help="Instead of a budget: keep this share of the lesion, for a model that `mtb calibrate` has calibrated for it.",
    )
    parser.add_argument(
        "--coverage",
        type=share,
        default=None,
        help="With --retention: the calibrated share of images that keep at least so much. Default: the promise on average.",
    )


def amount_of(options: argparse.Namespace, model: MedTokenBudget, selector: str | None) -> float | Guarantee:
    """The budget or the guarantee that the options ask for."""
    if options.retention is None:
        if options.coverage is not None:
            raise RequestError("--coverage belongs to --retention: it is the share of the images that keep at least so much.")
        return model.budget(options.budget)
    if options.budget is not None:
        raise RequestError("--budget and --retention exclude each other: a guarantee decides for each image how much is kept.")
    return model.guarantee(options.retention, options.coverage, selector)


def add_pass(parser: CommandParser) -> None:
    """Add --weights, --device, --batch-size and --workers."""
    parser.add_argument(
        "--weights",
        type=Path | None,
        default=None,
        help="Weights of the backbone, if they are not where the model expects them.",
    )
    parser.add_argument("--device", default="auto", help="Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    parser.add_argument("--batch_size", type=Count, default=16, help="Images per forward pass.")
    parser.add_argument("--workers", type=Parallel, default=2, help="Threads that decode images.")
