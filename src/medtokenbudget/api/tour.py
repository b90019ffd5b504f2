"""The demo, a tour of the product: the ready-made router on samples, then training, a sweep and a report. Offline, on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

from medtokenbudget.api.route import RouteConfig, Routed, route_files
from medtokenbudget.api.training import save_model
from medtokenbudget.backbone import extract
from medtokenbudget.config import BUDGETS, DEFAULT_METHODS, BackboneConfig, ExtractConfig, preset
from medtokenbudget.data import Drawings, Manifest, synthetic_manifest
from medtokenbudget.progress import say
from medtokenbudget.reporting.build import report
from medtokenbudget.runs.sweep import Sources, Study, run_studies

SAMPLES = Drawings(8, seed=5, off_center=True)
"""Off the center, where keeping the middle of the image does not help."""


def route_samples(out: Path | str) -> Routed:
    """The first stop of the tour: draw a few lesions and route them with the router of the package, in seconds.

    Args:
        out: Folder to write: the samples in `samples/`, the table and the overlays in `routed/`.

    Returns:
        What was written and how much of the lesions was kept, beside the controls.
    """
    samples = synthetic_manifest(Path(out) / "samples", SAMPLES)
    return route_files(samples, Path(out) / "routed", config=RouteConfig(overlay=True))


def demo(out: Path | str = "runs/demo", n: int = 1000, seed: int = 0, epochs: int | None = None) -> Path:
    """Run the whole product on drawn images: the ready-made router, then a training; a demo that was stopped resumes.

    Args:
        out: The run directory.
        n: Number of images.
        seed: Seed of the drawings.
        epochs: Fewer epochs for a quick look. Default: those of the presets.

    Returns:
        The path of the report.
    """
    out = Path(out)
    say(f"1 of 3: the ready-made router on {SAMPLES.n} drawn lesions that are not in the center ...")
    routed = route_samples(out / "router")
    say(f"  {_kept(routed)}\n  Pictures: {out / 'router' / 'routed' / 'overlays'}")
    say("2 of 3: a router and heads of our own, trained on drawn images (minutes) ...")
    manifest, store = out / "data" / "manifest.parquet", out / "tokens"
    if not manifest.exists():
        say(f"  Drawing {n} dermoscopic images ...")
        synthetic_manifest(out / "data", Drawings(n, seed), workers=os.cpu_count() or 1)
    say("  Extracting tokens with the embedded backbone ...")
    extract(Manifest.read(manifest), store, BackboneConfig(name="embedded"), ExtractConfig(views="off-center"))
    config = preset("paper")
    if epochs is not None:
        config = preset("paper", epochs=epochs, head_epochs=epochs, min_steps=0)
    study = Study("main", DEFAULT_METHODS, (42,), BUDGETS)
    say(f"  Training {len(study.methods)} methods and evaluating them at {len(study.budgets)} budgets ...")
    run_studies([study], Sources.of(manifest, store, out), out, config)
    save_model(out)
    say("3 of 3: the report ...")
    return report(out)


def _kept(routed: Routed) -> str:
    shares = {name: f"{found.of_ceiling:.0%}" for name, found in routed.retention.items()}
    return (
        f"Of the lesion that fits 76 of 256 patches, the router keeps {shares['router']}, the center of the image "
        f"{shares['center']}, chance {shares['random']}."
    )
