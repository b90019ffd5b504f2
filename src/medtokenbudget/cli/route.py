"""`mtb route`: which patches of images a router keeps, to a table; no training, no labels, no masks needed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medtokenbudget.cli.amount import add_amount, amount_of
from medtokenbudget.cli.model_pass import add_pass
from medtokenbudget.cli.parsing import command_parser, pick, require_effect
from medtokenbudget.config import Natural


def main(arguments: list[str]) -> int:
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

    from medtokenbudget.api.route import RouteConfig, Routed, route_files
    from medtokenbudget.model import load
    from medtokenbudget.progress import say
    from medtokenbudget.reporting.text import plural

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
    say(f"Routed {plural(written.done, 'image')} to {routed.table}.")
    return 0


def _measured(routed: object, amount: str) -> str:
    from medtokenbudget.api.route import Routed

    assert isinstance(routed, Routed)
    names = {"router": "router", "center": "center (control)", "random": "random (expected)"}
    n = routed.retention["router"].n
    head = f"{f'{amount}, n = {n}':<22}{'pooled':>10}{'mean':>10}{'of ceiling':>12}"
    rows = [
        f"{names[name]:<22}{found.pooled:>10.1%}{found.mean:>10.1%}{found.of_ceiling:>12.1%}"
        for name, found in routed.retention.items()
    ]
    return "\n".join([head, *rows])
