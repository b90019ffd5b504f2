"""Commands that show what is there: `demo`, `report`, `selectors`, `store info`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from medtokenbudget.cli.options import Command
from medtokenbudget.config import Count, Seed
from medtokenbudget.errors import WorkError
from medtokenbudget.runtime import say


@dataclass(frozen=True, kw_only=True)
class WriteReport(Command):
    """Write the tables, figures and report.html of a run, or compare several runs.

    Several runs are compared in the same tables with one row per run, and with paired differences where the runs evaluated the same
    images.
    """

    example = "mtb report runs/a runs/b --out runs/a-vs-b"

    runs: Positional[tuple[str, ...]]
    """Run directories written by `mtb train`, `sweep`, `reproduce`, `evaluate` or `demo`."""
    out: Path | None = None
    """Output directory. Default: the run directory; required for several runs."""
    json: bool = False
    """Print the headline and comparison numbers as JSON on standard output."""
    pictures: bool = True
    """'false' leaves images of the data set out of the page."""
    by: tuple[str, ...] = ()
    """Further columns of the manifest (`mtb data ... --columns FILE`) to show one run by."""

    def run(self) -> None:
        from medtokenbudget.reporting.page import build

        built = build(list(self.runs), self.out, self.pictures, self.by)
        if self.json:
            print(json.dumps({"page": str(built.page), **built.numbers}, indent=2, ensure_ascii=False))
            return
        print(built.page)
        folder = built.page.parent
        say(f"Open {built.page} in a browser. Tables are in {folder / 'tables'}, figures in {folder / 'figures'}.")


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Take a tour on drawn images, offline and on a CPU: packaged router, training, sweep, report.

    It routes drawn samples with the packaged router; draws dermoscopic images, extracts their tokens with the embedded backbone,
    trains routers and the heads of the other methods and evaluates them at ten budgets; and writes a report. If it is stopped, the
    same command resumes.
    """

    example = "mtb demo --out runs/demo"

    out: Path = Path("runs/demo")
    """Run directory to write."""
    n: Count = 1000
    """Number of images to draw."""
    seed: Seed = 0
    """Random seed of the drawings."""
    epochs: Count | None = None
    """Train for this many epochs, for a quick look. Default: as many as the paper."""

    def run(self) -> None:
        from medtokenbudget.api import demo
        from medtokenbudget.runs.run import Run, headline

        page = demo(self.out, self.n, self.seed, self.epochs)
        print(headline(Run(self.out).results))
        say(
            f"Report: {page}. Next:\n"
            f"  open {page} in a browser: what was kept, at every budget, next to the controls\n"
            "  mtb route YOUR_IMAGES --overlay --out routed: the packaged router on your own images\n"
            f"  mtb explore {self.out / 'model'}: look at patches, scores and budgets in the browser\n"
            "  docs/training.md: train a router on your own images and masks"
        )


@dataclass(frozen=True, kw_only=True)
class Selectors(Command):
    """List the selectors by name: what each keeps or merges, whether it learns, and what it reads besides the patches.

    Selectors of other installed packages are in the list.
    """

    example = "mtb selectors --json"

    json: bool = False
    """Print everything as JSON."""

    def run(self) -> None:
        from medtokenbudget.routing import list_selectors, selector_class

        found = {name: selector_class(name) for name in list_selectors()}
        if self.json:
            fields = ("kind", "title", "description", "learns")
            rows = [
                {"name": name, **{field: getattr(one, field) for field in fields}, "requires": list(one.requires)}
                for name, one in found.items()
            ]
            print(json.dumps(rows, indent=2, ensure_ascii=False))
            return
        width = max(map(len, found)) + 2
        for name, one in found.items():
            kind = f"{one.kind}, learns" if one.learns else one.kind
            reads = f" Reads {', '.join(one.requires)}." if one.requires else ""
            print(f"{name:<{width}}{kind:<18}{one.description}{reads}")


@dataclass(frozen=True, kw_only=True)
class StoreInfo(Command):
    """Show the backbone, views, images, size and manifests of a store of tokens."""

    example = "mtb store info stores/isic"

    store: Positional[Path]
    """Folder of the store."""
    json: bool = False
    """Print everything as JSON."""

    def run(self) -> None:
        from medtokenbudget.backbone.store import info

        facts = info(self.store)
        print(json.dumps(facts, indent=2, ensure_ascii=False) if self.json else _store_text(facts))
        if facts["damaged"]:
            names = ", ".join(facts["damaged"])
            raise WorkError(f"Damaged files in {self.store}: {names}. Delete them and run its `mtb extract` command again.")


def _store_text(facts: dict[str, Any]) -> str:
    backbone = facts["settings"]["backbone"]
    h, w = backbone["grid"]
    views = {"as-is" if view == "identity" else view: count for view, count in facts["views"].items()}
    lines = [
        f"{facts['path']}: {facts['images']:,} images, {facts['rows']:,} rows, {facts['bytes'] / 1e6:,.1f} MB",
        f"  backbone   {backbone['name']}, {backbone['image_size']} pixels, {h} x {w} patches of {backbone['dim']} numbers",
        f"  weights    SHA-256 {backbone['weights']}",
        f"  tokens     {'all patches' if facts['settings']['keep'] == 'patches' else 'routed'}, {facts['settings']['dtype']}",
        f"  signals    {', '.join(facts['signals']) or 'none'}",
        f"  views      {', '.join(f'{count:,} {view}' for view, count in views.items()) or 'none'}",
        f"  shards     {facts['shards']:,}, {facts['missing_shards']:,} missing; {facts['failed']:,} rows failed",
    ]
    for one in facts["manifests"]:
        fits = "fits" if one["fits"] else f"{one['images'] - one['present']:,} images are not extracted"
        lines.append(f"  manifest   {one['name']} ({one['source']}): {one['images']:,} images, {fits}")
    return "\n".join(lines)
