"""Commands that use a model: `route`, `predict`, `evaluate`, `serve`, `explore`, `export`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tyro.conf import Positional

from medtokenbudget.cli.options import Command, Engine
from medtokenbudget.config import HEADLINE_BUDGETS, Budget, RouteConfig, ServeConfig
from medtokenbudget.errors import RequestError
from medtokenbudget.runtime import say

if TYPE_CHECKING:
    from medtokenbudget.model import Guarantee, MedTokenBudget
    from medtokenbudget.model.batch import Routed


@dataclass(frozen=True, kw_only=True)
class Infer(Command):
    """Base of the commands that run a model over images."""

    first = frozenset({"images", "out", "model", "budget", "retention", "masks", "overlay", "mask", "box", "crop"})

    images: Positional[tuple[str, ...]]
    """Image files, folders, globs, or a manifest (.parquet)."""
    out: Path
    model: str
    weights: Path | None = None
    """Weights of the backbone, if they are not where the model expects them."""
    device: str = "auto"
    """Device to run on: auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    routing: RouteConfig

    def load(self) -> MedTokenBudget:
        """Load the model, after a check of the options that need no model."""
        self.require_effect(self.routing.tokens, "`tokens`", "tokens_dtype")

        from medtokenbudget.model import load

        return load(self.model, weights=self.weights, device=self.device)


@dataclass(frozen=True)
class OnCluster(Engine):
    """For clusters."""


@dataclass(frozen=True, kw_only=True)
class Route(Infer):
    """Write which patches of images a router keeps, and their scores, with no training at all.

    The default model is a router for dermoscopic images that comes with the package. Files that cannot be read are listed in
    errors.jsonl; the exit code is 1 only if no image could be read, or no mask could be used. The same command again replaces the
    results, or resumes if the table is made in shards.
    """

    example = "mtb route photos/ 'more/*.png' --budget 0.3 --overlay --out routed"

    out: Path
    """Folder to write."""
    model: str = "dermoscopy"
    """'dermoscopy', a run directory, a model folder or a hub id (owner/name)."""
    store: Path | None = None
    """Tokens of the images of one manifest, by `mtb extract`: read instead of running the backbone."""
    masks: Path | None = None
    """Folder with lesion masks (a.png, a_mask.png, a_segmentation.png and the like for a.jpg), to measure how much is kept."""
    cluster: OnCluster

    def run(self) -> None:
        self.require_effect(self.cluster.engine == "ray", '`engine="ray"`', "address")
        self.require_effect(self.cluster.engine == "local", '`engine="local"`', "jobs")

        from medtokenbudget.model.batch import amount_of, route_files

        model, config, where = self.load(), self.routing, (self.cluster.engine, self.cluster.address)
        routed = route_files(list(self.images), self.out, model, self.masks, config, *where, self.store)
        if routed.failed:
            say(_failures(routed))
        if routed.unfamiliar:
            say(
                f"{routed.unfamiliar} of {routed.done} images are unlike the training images of this model (column "
                "`unfamiliar`): do not rely on what was kept of them."
            )
        if routed.retention and routed.retention["router"].n:
            print(_retention_table(routed, amount_of(model, config)))
        say(f"Routed {routed.done:,} image{'' if routed.done == 1 else 's'} to {routed.table}.")


def _failures(counts: Any) -> str:
    return f"{counts.failed} of {counts.done + counts.failed} images could not be read. The reasons are in {counts.errors}."


def _retention_table(routed: Routed, amount: float | Guarantee) -> str:
    titles = {"router": "router", "center": "center (control)", "random": "random (expected)"}
    n = routed.retention["router"].n
    asked = f"budget {amount:g}" if isinstance(amount, float) else f"promised {amount.retention:g}"
    head = f"{f'{asked}, n = {n}':<22}{'pooled':>10}{'mean':>10}{'of ceiling':>12}"
    rows = [
        f"{titles[name]:<22}{share.pooled:>10.1%}{share.mean:>10.1%}{share.of_ceiling:>12.1%}"
        for name, share in routed.retention.items()
    ]
    return "\n".join([head, *rows])


@dataclass(frozen=True, kw_only=True)
class Predict(Infer):
    """Write class probabilities and kept patches of images to a CSV or Parquet table.

    Files that cannot be read are listed in predictions.errors.jsonl next to predictions.csv; the exit code is 1 only if no image
    could be read.
    """

    hidden = frozenset({"table", "mask", "box", "crop", "shard_size", "jobs"})
    example = "mtb predict photos/ 'more/*.png' --model runs/demo --budget 0.3 --overlay --out predictions.csv"

    model: str
    """Run directory, model folder or hub id (owner/name)."""
    out: Path
    """Table to write, FILE.csv or FILE.parquet."""

    def run(self) -> None:
        from medtokenbudget.model.batch import predict_files

        model = self.load()
        summary = predict_files(list(self.images), self.out, model, self.routing)
        if summary.failed:
            say(_failures(summary))
        where = f" and overlays to {self.out.parent / 'overlays'}" if self.routing.overlay else ""
        say(f"Wrote {summary.done} predictions of {self.routing.selector or model.main} to {self.out}{where}.")


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Evaluate a saved model on other images: external validation with a report.

    The images may have masks, labels, both or neither. The report shows the model next to the controls center, darkness, random and
    oracle: retention and classification with intervals, strata, calibration, the worst images, and how much was lost against the
    model's own validation.
    """

    example = "mtb evaluate other.parquet --model runs/first --out runs/external"
    first = frozenset({"manifest", "out", "model", "kept", "store", "budgets", "selector", "classes", "part", "by"})

    manifest: Positional[Path]
    """The images (.parquet), made with `mtb data`."""
    out: Path
    """Run directory to write."""
    model: str = "dermoscopy"
    """'dermoscopy', a run directory, a model folder or a hub id (owner/name)."""
    kept: Path | None = None
    """Instead of a model: a table (.parquet) of the patches that any method kept, such as routes.parquet."""
    store: Path | None = None
    """Tokens of the images. Default: extract them."""
    budgets: tuple[Budget, ...] = HEADLINE_BUDGETS
    """Shares of the patches to keep, such as 0.1 0.3 0.5."""
    selector: str | None = None
    """Method of the model. Default: its main method."""
    classes: Path | None = None
    """JSON file from classes of the data to classes of the model where their names differ; it can also leave classes out."""
    part: Literal["auto", "val", "select", "train", "all"] = "auto"
    """Images to evaluate. auto: the validation images of the manifest that the model was trained with, all of others; with `kept`,
    the validation images if there are any."""
    by: tuple[str, ...] = ()
    """Further columns of the manifest (`mtb data ... --columns FILE`) to show results by."""
    pictures: bool = True
    """'false' leaves images of the data set out of the report."""

    def run(self) -> None:
        from medtokenbudget.api import evaluate, evaluate_kept
        from medtokenbudget.runs.run import headline

        idle = [f"`{name}`" for name in ("model", "budgets", "selector", "classes") if name in self.given]
        if self.kept is not None and idle:
            raise RequestError(f"`kept` replaces the model and its options. Leave out {' and '.join(idle)}.")
        if self.kept is not None:
            run = evaluate_kept(self.kept, self.manifest, self.out, self.store, self.part, self.by)
        else:
            asked = (self.out, self.store, self.budgets, self.selector, self.classes, self.part, self.by)
            run = evaluate(self.model, self.manifest, *asked)
        run.record_command("evaluate", self.words)
        print(headline(run.results))
        about = run.evaluation or {}
        if about.get("unfamiliar"):
            share = f"{about['unfamiliar'] / about['images']:.1%} of {about['images']:,}"
            say(f"{share} images are unlike the training images of this model: do not rely on what was kept of them.")
        say(f"Wrote {run.report(pictures=self.pictures)}.")


@dataclass(frozen=True, kw_only=True)
class Serve(Command):
    """Serve a model: the explorer page for the browser, and the same as a JSON API (POST /v1/route).

    Only this machine can connect, unless you set --host and a token.
    """

    example = "mtb serve runs/demo/model --port 8765"
    first = frozenset({"model", "host", "port", "allowed_hosts", "token_file", "weights", "device"})
    open_browser: ClassVar[bool] = False

    model: Positional[str | None] = None
    """Folder of a saved model, a run directory, or a hub id. Default: the dermoscopy router of the package."""
    settings: ServeConfig

    def run(self) -> None:
        missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if importlib.util.find_spec(name) is None]
        if missing:
            raise RequestError(f"The server needs {', '.join(missing)}. Run `pip install 'medtokenbudget[serve]'`.")

        from medtokenbudget.serve.server import serve

        serve(self.model, self.settings, self.open_browser)


@dataclass(frozen=True, kw_only=True)
class Explore(Serve):
    """Serve a model and open its explorer page in the browser.

    The same as `mtb serve`, plus the browser. Only this machine can connect, unless you set --host and a token.
    """

    example = "mtb explore runs/demo/model --port 8765"
    open_browser = True


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Export a model as ONNX files, as a static site or as a folder for the hub.

    ONNX: one file per budget, compared with PyTorch before it is written. The static site runs the model in the browser. The folder
    for the hub has no local paths.
    """

    example = "mtb export runs/demo --format onnx --budget 0.1 0.3 --graph whole --out exported"

    model: Positional[str | None] = None
    """Run directory, model folder or hub id (owner/name). Default: the packaged router."""
    out: Path
    """Folder to write to."""
    format: Literal["onnx", "web", "hub"] = "onnx"
    """ONNX files, the explorer as a static site, or a model folder for the hub."""
    budget: tuple[Budget, ...] | None = None
    """Budgets, one ONNX file each. Default: that of the model, or {DEFAULT_BUDGET}."""
    graph: Literal["routing", "whole"] = "whole"
    """What the ONNX file computes. 'whole': image to logits; 'routing': tokens to logits."""
    selector: str | None = None
    """Method to export as ONNX. Default: the model's main method. The model's README.md lists all of them."""
    weights: Path | None = None
    """Weights of the backbone, if they are not where the model expects them."""
    push: str | None = None
    """With `format="hub"`: also upload to this hub id (owner/name), as a private repository."""
    runtime: Path | None = None
    """With `format="web"`: folder of the npm package onnxruntime-web. Default: fetched by npm, once."""

    def run(self) -> None:
        self.require_effect(self.format == "onnx", '`format="onnx"`', "budget", "graph", "selector")
        self.require_effect(self.format == "hub", '`format="hub"`', "push")
        self.require_effect(self.format == "web", '`format="web"`', "runtime")

        from medtokenbudget.model import load

        if self.model is None:
            say("No model given. Using the router for dermoscopic images that comes with the package; it predicts no class.")
        model = load(self.model or "dermoscopy", weights=self.weights, device="cpu")
        if self.format == "hub":
            say(f"Wrote the model to {model.save_pretrained(self.out)}. Load it with mtb.load.")
            if self.push:
                say(f"Uploaded it to {model.push_to_hub(self.push)}.")
        elif self.format == "web":
            self._write_site(model)
        else:
            from medtokenbudget.model.onnx import export_onnx

            for budget in self.budget or [model.budget(None)]:
                path = export_onnx(model, self.out, budget, self.graph, self.selector)
                say(f"Wrote {path} ({path.stat().st_size / 1024**2:.1f} MB), checked against PyTorch.")

    def _write_site(self, model: MedTokenBudget) -> None:
        from medtokenbudget.serve.service import is_demo
        from medtokenbudget.serve.site import find_runtime, write_site

        graphs = write_site(model, self.out, find_runtime(self.runtime), self.model is not None and is_demo(self.model))
        for method, why in graphs.left_out.items():
            say(f"Left out method '{method}': {why}.")
        size = sum(path.stat().st_size for path in self.out.rglob("*") if path.is_file())
        say(
            f"Wrote the site to {self.out} ({size / 1e6:.1f} MB), checked against PyTorch. "
            f"To see it: python -m http.server -d {self.out}"
        )
