"""The demo: draw dermoscopic images, route some with the router of the package, extract tokens, train, compare, report.

Offline, on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from medtokenbudget.api.route import OVERLAYS, SUMMARY, RouteConfig, route_files
from medtokenbudget.api.training import save_model
from medtokenbudget.config import BUDGETS, DEFAULT_METHODS, BackboneConfig, ExtractConfig, preset
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.experiments.sources import Sources
from medtokenbudget.experiments.sweep import Study, run_studies
from medtokenbudget.features import extract
from medtokenbudget.progress import say
from medtokenbudget.reporting import report

SHOWN = 16
"""Drawings that the router of the package is shown on."""


def demo(out: Path | str = "runs/demo", n: int = 1000, seed: int = 0, epochs: int | None = None) -> Path:
    """Run the whole product on drawn images; a demo that was stopped resumes.

    Args:
        out: The run directory.
        n: Number of images.
        seed: Seed of the drawings.
        epochs: Fewer epochs for a quick look. Default: those of the presets.

    Returns:
        The path of the report.
    """
    out = Path(out)
    manifest, store = out / "data" / "manifest.parquet", out / "tokens"
    if not manifest.exists():
        say(f"Drawing {n} dermoscopic images ...")
        synthetic_manifest(out / "data", Drawings(n, seed), workers=os.cpu_count() or 1)
    _show_router(Manifest.read(manifest), out / "routed")
    say("Extracting tokens with the embedded backbone ...")
    extract(Manifest.read(manifest), store, BackboneConfig(name="embedded"), ExtractConfig(views="off-center"))
    config = preset("paper")
    if epochs is not None:
        config = replace(config, epochs=epochs, head_epochs=epochs)
    study = Study("main", DEFAULT_METHODS, (42,), BUDGETS)
    say(f"Training {len(study.methods)} methods and evaluating them at {len(study.budgets)} budgets ...")
    run_studies([study], Sources.of(manifest, store, out), out, config)
    save_model(out)
    return report(out)


def _show_router(manifest: Manifest, out: Path) -> None:
    """What the router of the package keeps of a few of the drawings, before anything is trained."""
    if (out / SUMMARY).exists():
        return
    routed = route_files(manifest.take(range(min(SHOWN, len(manifest)))), out, config=RouteConfig(overlay=True))
    kept = routed.retention["router"]
    say(
        f"The router that comes with the package keeps {kept.of_ceiling:.0%} of the lesion that fits budget 0.3 on {kept.n} "
        f"drawings, which it has never seen (center: {routed.retention['center'].of_ceiling:.0%}); see {out / OVERLAYS}."
    )
