"""The verbs of the package as a researcher calls them: paths or objects alike, presets by name, a `Run` as the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.api.run import Run
from medtokenbudget.api.training import HeadChoice, save_model, train_router
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone import extract as run_extraction
from medtokenbudget.config import DEFAULT_SELECTOR, BackboneConfig, ExtractConfig, TrainConfig, preset
from medtokenbudget.data import Manifest
from medtokenbudget.model.early import EarlyRouting
from medtokenbudget.reporting.build import report as write_report
from medtokenbudget.runs import Execution
from medtokenbudget.runs import reproduce as run_reproduction
from medtokenbudget.runs import sweep as run_sweep

AnyManifest = Manifest | Path | str
AnyStore = FeatureStore | Path | str


def extract(
    manifest: AnyManifest,
    store: Path | str,
    backbone: BackboneConfig | str = BackboneConfig.name,
    config: ExtractConfig | None = None,
    early: EarlyRouting | None = None,
    **options: Any,
) -> FeatureStore:
    """Run the frozen backbone once over the images of a manifest and fill a store of tokens.

    Args:
        manifest: The images, as an object or as the path of its file.
        store: Folder of the store; an extraction that was stopped there resumes.
        backbone: Name of a timm vision transformer, 'embedded' for the small one in the package, or all settings.
        config: Batch size, views, number format, ...
        early: Run the backbone where the lesion is, such as `mtb.EarlyRouting(mtb.load("runs/scout"), "scout", budget=0.3)`.
        options: Single fields of `ExtractConfig`, such as `views="off-center"`.

    Returns:
        The open store.

    Example:
        >>> store = mtb.extract("photos.parquet", "few-tokens", backbone="embedded", views="none")
        >>> store.grid, store.dim
        ((16, 16), 192)
    """
    settings = backbone if isinstance(backbone, BackboneConfig) else BackboneConfig(name=backbone)
    opened = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    return run_extraction(opened, store, settings, replace(config or ExtractConfig(), **options), early=early)


def train(
    manifest: AnyManifest,
    store: AnyStore,
    out: Path | str,
    config: TrainConfig | str = "lesion-first",
    selector: str = DEFAULT_SELECTOR,
    head: HeadChoice = "auto",
) -> Run:
    """Train one router and its head, evaluate it beside the controls `center` and `random`, and save it as a model.

    Args:
        manifest: The images with their labels, masks and split.
        store: Their tokens.
        out: The run directory; a training that was stopped there resumes.
        config: A preset by name ('lesion-first' or 'paper'), or all settings.
        selector: Any selector that learns.
        head: 'none' trains the router from masks alone, without a head; so does 'auto' if no image has a label.

    Returns:
        The run: `.results`, `.predictions`, `.model`, `.report()`.

    Example:
        >>> run = mtb.train("photos.parquet", "tokens", "runs/first", config)
        >>> run.model.predict("photo.jpg", budget=0.3)[0].kept.shape
        (76,)
    """
    train_router(manifest, store, out, _settings(config), selector, head)
    return Run(out)


def sweep(
    manifest: AnyManifest,
    store: AnyStore,
    out: Path | str,
    methods: Sequence[str] | None = None,
    budgets: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    config: TrainConfig | str = "lesion-first",
    engine: Literal["local", "ray"] = "local",
    jobs: int = 0,
    address: str | None = None,
    heads: Sequence[str] | None = None,
) -> Run:
    """Train and evaluate methods x seeds at many budgets.

    Args:
        manifest: The images with their labels, masks and split.
        store: Their tokens.
        out: The run directory; a sweep that was stopped there resumes.
        methods: Texts such as 'lats:lesion-first', 'center' or 'tome'. Default: the paper's methods, ours and the controls.
        budgets: Shares of the patches to keep. Default: those of `config`.
        seeds: Seeds; each gives one training per method. Default: that of `config`.
        config: A preset by name, or all settings, such as `mtb.preset("lesion-first", lr=1e-4)`. What differs from the preset
            reaches every method, whatever its own preset; a setting that no method uses is refused.
        engine: Local processes, or a Ray cluster.
        jobs: Trainings at the same time; 0 means one per core. In a script, use `if __name__ == "__main__":` for more than one.
        address: Address of a running Ray cluster.
        heads: Heads to combine every method with, such as ['mlp', 'abmil']; a method that names its own ('center+linear') keeps it.

    Returns:
        The run, with one model of all its methods if one of them learns.

    Example:
        >>> config = mtb.preset("lesion-first", head_epochs=2)
        >>> run = mtb.sweep("photos.parquet", "tokens", "runs/sweep", ["center", "norm"], budgets=[0.3], config=config, jobs=1)
        >>> run.results[["method", "view", "k"]].values.tolist()
        [['center', 'as-is', 76], ['center', 'off-center', 76], ['norm', 'as-is', 76], ['norm', 'off-center', 76]]
    """
    run_sweep(manifest, store, out, methods, budgets, seeds, _settings(config), Execution(engine, jobs, address), heads)
    save_model(out)
    return Run(out)


def reproduce(
    manifest: AnyManifest,
    store: AnyStore,
    out: Path | str,
    study: str | Sequence[str] = "all",
    config: TrainConfig | None = None,
    engine: Literal["local", "ray"] = "local",
    jobs: int = 0,
    address: str | None = None,
) -> Run:
    """Run the paper's studies under its own protocol.

    Args:
        manifest: The images with their labels, masks and split.
        store: Their tokens.
        out: The run directory; a reproduction that was stopped there resumes.
        study: Names of studies, or 'all'.
        config: Common settings. Default: the paper's.
        engine: Local processes, or a Ray cluster.
        jobs: Trainings at the same time; 0 means one per core.
        address: Address of a running Ray cluster.

    Returns:
        The run; `run.report()` puts the paper's numbers beside ours.

    Example:
        >>> config = mtb.preset("paper", head_epochs=2)
        >>> run = mtb.reproduce("photos.parquet", "tokens", "runs/paper", study="subset", config=config, jobs=1)
        >>> sorted(set(run.results["method"]))
        ['center', 'random']
    """
    run_reproduction(manifest, store, out, study, config, Execution(engine, jobs, address))
    save_model(out)
    return Run(out)


def report(run: Run | Path | str, *others: Run | Path | str, out: Path | str | None = None, pictures: bool = True) -> Path:
    """Write the tables, the figures and the page `report.html` of a run, or compare several runs.

    Args:
        run: A run, or its directory.
        others: Further runs to compare it with.
        out: Where the report goes. Default: into the run directory; required for a comparison.
        pictures: False leaves images of the data set out of the page.

    Returns:
        The path of the page.

    Example:
        >>> mtb.report("runs/first").name
        'report.html'
    """
    paths = [entry.path if isinstance(entry, Run) else Path(entry) for entry in (run, *others)]
    return write_report(*paths, out=out, pictures=pictures)


def _settings(config: TrainConfig | str) -> TrainConfig:
    return preset(config) if isinstance(config, str) else config
