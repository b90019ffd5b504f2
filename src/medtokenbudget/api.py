"""The verbs of the package as a researcher calls them: paths or objects alike, presets by name, a `Run` as the answer.

The report is imported where it is written, so that training and saving a model load no plotting library.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.backbone import extract as run_extraction
from medtokenbudget.backbone.backbone import PIXELS, Backbone
from medtokenbudget.backbone.views import IDENTITY, OFF_CENTER
from medtokenbudget.config import (
    BUDGETS,
    DEFAULT_SELECTOR,
    HEADLINE_BUDGETS,
    BackboneConfig,
    ExtractConfig,
    Seed,
    TrainConfig,
    check_values,
    given_settings,
    preset,
    read_share,
    train_config_from_dict,
)
from medtokenbudget.data import Manifest
from medtokenbudget.data.strata import column_strata
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import exclusive
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.jobs import Execution
from medtokenbudget.model.batch import RouteConfig, route_files
from medtokenbudget.model.early import EarlyRouting
from medtokenbudget.model.model import MedTokenBudget, load, loaded
from medtokenbudget.model.saved import ROUTER, resolve, write_guarantees
from medtokenbudget.routing import create_selector, default_methods, selector_class
from medtokenbudget.routing.conformal import Guarantee, Promise
from medtokenbudget.routing.selectors.scout import Scout
from medtokenbudget.runs import evaluate as evaluation
from medtokenbudget.runs import sweep as sweeping
from medtokenbudget.runs.card import card_text
from medtokenbudget.runs.evaluate import Part
from medtokenbudget.runs.method import Method, method_of, with_heads
from medtokenbudget.runs.preflight import READS_ROUTED, available_controls, supported_methods
from medtokenbudget.runs.run import AS_IS, FILE, Run
from medtokenbudget.runs.studies import PROTOCOL, Study, Unit, chosen_studies
from medtokenbudget.runtime import say
from medtokenbudget.tokens import NOT_FROM_BACKBONE
from medtokenbudget.training.familiarity import fit_familiarity
from medtokenbudget.training.rows import TrainingRows
from medtokenbudget.training.scouting import fit_scout_familiarity, train_scout

AnyManifest = Manifest | Path | str
AnyStore = FeatureStore | Path | str
HeadChoice = Literal["auto", "none"]
SCOUT = "scout"


def extract(
    manifest: AnyManifest,
    store: Path | str,
    backbone: BackboneConfig | Backbone | str | Any = BackboneConfig.name,
    config: ExtractConfig | None = None,
    early: EarlyRouting | None = None,
    **options: Any,
) -> FeatureStore:
    """Run the frozen backbone once over the images of a manifest and fill a store of tokens.

    Args:
        manifest: The images, as an object or as the path of its file.
        store: Folder of the store; an extraction that was stopped there resumes.
        backbone: Name of a timm vision transformer, 'hf:owner/name' for one of transformers, 'embedded' for the small one in the
            package, all settings, or a model of timm or transformers itself (a `Backbone.from_model` for another layer).
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
    settings = BackboneConfig(name=backbone) if isinstance(backbone, str) else backbone
    if not isinstance(settings, (BackboneConfig, Backbone)):
        settings = Backbone.from_model(settings, type(settings).__name__)
    return run_extraction(_opened(manifest), store, settings, replace(config or ExtractConfig(), **options), early=early)


def train(
    manifest: AnyManifest,
    store: AnyStore | None,
    out: Path | str,
    config: TrainConfig | str = "lesion-first",
    selector: str = DEFAULT_SELECTOR,
    head: HeadChoice = "auto",
    controls: bool = True,
) -> Run:
    """Train one router and its head, save them as a model, and compare them with controls such as `center` and `darkness`.

    Args:
        manifest: The images with their labels, masks and split.
        store: Their tokens; None for the preset 'scout', which learns from images and masks.
        out: The run directory; a training that was stopped there resumes.
        config: A preset by name ('lesion-first', 'paper' or 'scout'), or all settings.
        selector: Any selector that learns.
        head: 'none' trains the router from masks alone, without a head; so does 'auto' if no image has a label.
        controls: Whether to train a head for each control too, once the model is saved.

    Returns:
        The run: `.results`, `.predictions`, `.model`, `.report()`.

    Example:
        >>> run = mtb.train("photos.parquet", "tokens", "runs/first", config)
        >>> run.model.predict("photo.jpg", budget=0.3)[0].kept.shape
        (76,)
    """
    if head not in ("auto", "none"):
        raise RequestError(f"`head` must be 'auto' or 'none', got '{head}'.")
    opened, settings = _opened(manifest), preset(config) if isinstance(config, str) else config
    if settings.recipe == "scout":
        if store is not None or selector not in (DEFAULT_SELECTOR, SCOUT) or head != "auto" or not controls:
            raise RequestError("The recipe 'scout' reads images and masks. Leave out `store`, `selector`, `head` and `controls`.")
        return _train_scout(manifest, Path(out), settings)
    if store is None:
        raise RequestError("`store` is required: the tokens that `mtb extract` wrote. Only the recipe 'scout' needs none.")
    unlabeled = bool(opened.classes) and (head == "none" or opened.rows["label"].isna().all())
    # A manifest that came as a path stays one: the run records where it is.
    run = Run.begin(out, opened.without_labels() if unlabeled else manifest, store, settings)
    if run.store.fixed_budget is None:
        # A control that needs the mask of an image (the oracle) could never classify a new one.
        compared = [name for name in available_controls(run.store) if controls and "has_mask" not in selector_class(name).requires]
        methods = [str(method_of(selector, settings)), *compared]
    else:  # routed already: only the head is left to train
        methods, run.config = [READS_ROUTED], _at_fixed_budget(run)
    study = Study("train", tuple(methods), (settings.seed,), run.config.budgets)
    trained: dict[Unit, RoutedClassifier] = {}
    with sweeping.begun(run, [study]) as (units, done):
        with sweeping.training_bar(len(units) - len(done)) as bar:
            for unit in units:
                classifier = None if unit in done else sweeping.run_unit(run, unit, on_epoch=sweeping.show_epochs(bar, unit))
                if classifier is not None:
                    trained[unit] = classifier
                elif unit == units[0] and unit not in done:
                    raise WorkError(sweeping.failure(run, unit))  # without the router the run is worthless
                bar.update(unit not in done)
                if unit == units[0] and not done.issuperset(units):  # a model to use, whatever becomes of the controls
                    sweeping.collect(run, [study], [unit])
                    save_model(run, trained)
        done |= trained.keys()
        sweeping.say_failed(run, units, done)
        sweeping.collect(run, [study], [unit for unit in units if unit in done])
        save_model(run, trained)
    return run


def _train_scout(manifest: AnyManifest, out: Path, config: TrainConfig) -> Run:
    """Train a scout, measure it on the validation images next to the controls, and save it as a model."""
    # Labels are never read: a scout learns the lesion alone.
    opened = _opened(manifest).without_labels()
    validation = opened.part("val")
    if not validation.rows["mask"].notna().any():
        raise RequestError(f"'{opened.name}' has no validation image with a mask to measure with. Split it with `mtb data split`.")
    if (out / FILE).exists() and SCOUT not in Run(out).methods:
        raise RequestError(f"{out} contains another run. Use another `out`.")
    with exclusive(out):
        classifier = train_scout(opened, config, out)
        backbone = BackboneConfig(name=PIXELS, image_size=config.scout.image_size)
        pixels = Backbone.load(backbone)
        assert isinstance(classifier.selector, Scout)
        # Masks of validation images are used only for evaluation: they are not counted as learned from.
        masks = int(opened.rows["mask"].notna().to_numpy()[opened.rows["split"] != "val"].sum())
        about = {"run": {"dataset": opened.name, "seeds": [config.seed], "hashes": {"manifest": opened.hash}, "masks": masks}}
        embedded = BackboneConfig(name="embedded")
        model = MedTokenBudget(
            backbone,
            pixels.fingerprint,
            (),
            {SCOUT: classifier} | {name: RoutedClassifier(create_selector(name), None) for name in ("center", "random")},
            config,
            main=SCOUT,
            info=about,
            tokens_from=(embedded, Backbone.load(embedded).fingerprint),
            familiarity=fit_scout_familiarity(classifier.selector, pixels, opened, config.seed),
            device=config.device,
        )
        store = run_extraction(validation, out / "tokens", backbone, ExtractConfig(views="off-center", device=config.device))
        original, off_center = (store.rows(validation.ids, view=view, strict=False) for view in (IDENTITY, OFF_CENTER))
        held_out = evaluation.HeldOut(validation, store, original, off_center, "val")
        run = Run.begin(out, opened, store, config)
        # Without labels it is another manifest than the user's file, so it is kept with the run.
        opened.write(run.manifest_path)
        evaluation.evaluate_model(run, model, held_out, opened, SCOUT, config.budgets, {}, trained=True)
        model.card = card_text(run, model)
        model.save_pretrained(out / "model")
    return run


def _at_fixed_budget(run: Run) -> TrainConfig:
    """Return the settings of a run whose tokens were routed at one budget, which is then the only one."""
    budget = run.store.fixed_budget
    return run.config if budget is None or "budgets" in given_settings(run.config) else replace(run.config, budgets=(budget,))


def sweep(
    manifest: AnyManifest,
    store: AnyStore,
    out: Path | str,
    methods: Sequence[str] | None = None,
    budgets: Sequence[float | str] | None = None,
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
        methods: Texts such as 'lats:lesion-first', 'center' or 'tome', or ['protocol']: the rows, budgets and seeds of the
            benchmark protocol. Default: the paper's methods, ours and the controls.
        budgets: Shares of the patches to keep, such as 0.3 or '30%'. Default: the budgets of `config`.
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
    run = Run.begin(out, manifest, store, preset(config) if isinstance(config, str) else config)
    # The command line gives the budgets in `config`, Python users as an argument.
    given_budgets, name = given_settings(run.config).get("budgets"), "sweep"
    if methods is not None and list(methods) == [PROTOCOL.name]:
        name, methods, seeds = PROTOCOL.name, supported_methods(run, PROTOCOL.methods), seeds or PROTOCOL.seeds
        budgets = budgets or given_budgets or PROTOCOL.budgets
    if budgets is not None:
        shares = tuple(read_share("budgets", budget) for budget in budgets)
        if given_budgets is not None and shares != tuple(given_budgets):
            raise RequestError("The budgets were given twice, in config and as an argument. Leave out one of them.")
        run.config = replace(run.config, budgets=shares)
    elif run.store.fixed_budget is not None:
        run.config = _at_fixed_budget(run)
    seeds = (run.config.seed,) if seeds is None else tuple(seeds)
    check_values({"seeds": (seeds, tuple[Seed, ...])})
    if methods is None:
        methods = supported_methods(run, default_methods() if run.store.fixed_budget is None else (READS_ROUTED,))
    study = Study(name, with_heads(methods, heads), seeds, tuple(run.config.budgets))
    sweeping.run_studies(run, [study], Execution(engine, jobs, address))
    save_model(run)
    return run


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
        The run; `run.report()` puts the paper's numbers next to ours.

    Example:
        >>> config = mtb.preset("paper", head_epochs=2)
        >>> run = mtb.reproduce("photos.parquet", "tokens", "runs/paper", study="subset", config=config, jobs=1)
        >>> sorted(set(run.results["method"]))
        ['center', 'random']
    """
    config = config or preset("paper")
    # The paper's protocol, unless another one was chosen.
    if "protocol" not in given_settings(config):
        config = replace(config, protocol="paper")
    run = Run.begin(out, manifest, store, config)
    names = [study] if isinstance(study, str) else list(study)
    studies = chosen_studies(names, run.manifest.source.split()[0])
    # All methods at once, so that what is left out is said once and not for each study.
    supported_by_data = supported_methods(run, tuple(dict.fromkeys(method for one in studies for method in one.methods)))
    studies = [replace(one, methods=tuple(m for m in one.methods if m in supported_by_data)) for one in studies]
    supported = [one for one in studies if one.methods]
    sweeping.run_studies(run, supported, Execution(engine, jobs, address), chosen_for_user=("protocol",))
    save_model(run)
    return run


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
    from medtokenbudget.reporting.page import build

    return build([entry.path if isinstance(entry, Run) else Path(entry) for entry in (run, *others)], out, pictures).page


def calibrate(
    model: MedTokenBudget | Path | str,
    manifest: AnyManifest,
    retention: float | str,
    coverage: float | str | None = None,
    cap: float | str | None = None,
    store: AnyStore | None = None,
    selector: str | None = None,
    part: Part = "auto",
    out: Path | str | None = None,
    by: str | None = None,
) -> Guarantee:
    """Calibrate a model on images with masks, so that it keeps a promised share of the lesion.

    Args:
        model: A run directory, a model folder, a hub id, or a model. The guarantee is saved in the folder (a model that was passed
            as an object is only changed in memory).
        manifest: Images with masks that the model was not trained on. Their groups are the exchangeable units.
        retention: Promised share of the lesion patches, such as 0.95 or '95%'.
        coverage: None promises it on average. With 0.9, nine of ten images keep at least `retention` of their lesion.
        cap: Largest share of the patches that an image may keep. The promise holds with it, or is refused.
        store: Tokens of the images; None extracts them.
        selector: Method to calibrate; None means the main one.
        part: Which images of the manifest; 'auto' takes the validation images of the model's own manifest, all of another one.
        out: Folder for a calibrated copy; None saves the guarantee in the model folder itself.
        by: Keep the promise for each value of 'class', 'size' (quarters of the lesion sizes), 'position', 'skin tone', 'hair' or
            'dark corners' that has enough groups; `guarantee.parts` says what each kept.

    Returns:
        The guarantee. `model.guarantee(retention)` finds it again.

    Raises:
        RequestError: The images cannot be used, or do not allow this promise.

    Example:
        >>> guarantee = mtb.calibrate("runs/first", "photos.parquet", retention=0.8, store="tokens")
        >>> mtb.load("runs/first").predict("photo.jpg", budget=guarantee)[0].guarantee.retention
        0.8
    """
    most, covered = (None if value is None else read_share(name, value) for name, value in (("cap", cap), ("coverage", coverage)))
    promise = Promise(read_share("retention", retention), covered)
    folder = None if isinstance(model, MedTokenBudget) else resolve(model)
    if folder is not None and out is None and not Path(str(model)).expanduser().is_dir():
        raise RequestError(f"{model} is not a folder of yours, so nothing can be saved in it. Pass `out` for a calibrated copy.")
    chosen = loaded(model)
    with tempfile.TemporaryDirectory(prefix="mtb-calibrate-") as scratch:
        run = None if folder is None else evaluation.run_of(folder)
        opened = _opened(manifest)
        # Before tokens are extracted, which takes long.
        evaluation.check_stratum(by, opened)
        images = evaluation.held_out(chosen, opened, store, Path(scratch) / "tokens", part, run)
        guarantee = evaluation.calibrated(chosen, images, promise, selector, most, by)
    # The same promise again replaces the earlier one, whatever its cap.
    others = [one for one in chosen.guarantees if not one.keeps(guarantee, guarantee.selector)]
    chosen.guarantees = tuple(sorted([*others, guarantee], key=lambda one: (one.selector, one.retention, one.coverage or 0)))
    if by is not None:
        chosen.card = guarantee.on_card(chosen.card)
    if out is not None:
        chosen.save_pretrained(out)
    elif folder is not None:
        write_guarantees(folder, chosen.guarantees, chosen.card)
    return guarantee


def evaluate(
    model: MedTokenBudget | Path | str,
    manifest: AnyManifest,
    out: Path | str,
    store: AnyStore | None = None,
    budgets: Sequence[float | str] = HEADLINE_BUDGETS,
    selector: str | None = None,
    classes: Mapping[str, str | None] | Path | str | None = None,
    part: Part = "auto",
    by: Sequence[str] = (),
) -> Run:
    """Evaluate a saved model on a manifest, next to the controls `center`, `darkness`, `random` and `oracle`.

    Args:
        model: A run directory, a model folder, a hub id, 'dermoscopy', or a model.
        manifest: The images, with masks, labels, both or neither.
        out: The run directory to write.
        store: Tokens of the images; None extracts them into `out/tokens`.
        budgets: Shares of the patches to keep.
        selector: Method of the model; None means its main one.
        classes: Where class names differ: class of the data to class of the model (None leaves it out), or a JSON file of that.
        part: Which images; 'auto' takes the validation images of the model's own manifest, all images of another one.
        by: Further columns of the manifest to show results by.

    Returns:
        The run: `.results`, `.predictions`, `.report()`.

    Raises:
        RequestError: Classes do not match, the images cannot be used, or the model was trained on them.
        MismatchError: The store is of another backbone or grid.

    Example:
        >>> run = mtb.evaluate("runs/first", "photos.parquet", "runs/external", store="tokens", budgets=[0.3])
        >>> sorted(set(run.results["method"]))[:2]
        ['center', 'context:lesion-first']
    """
    target, original = Path(out), _opened(manifest)
    shares = [read_share("budgets", budget) for budget in budgets]
    _check_evaluation(target, original, by)
    folder = None if isinstance(model, MedTokenBudget) else resolve(model)
    chosen = loaded(model)
    mapping = evaluation.read_mapping(classes) if isinstance(classes, (str, Path)) else classes
    labeled = evaluation.in_classes_of(original, chosen.classes, mapping)
    trained_in = None if folder is None else evaluation.run_of(folder)
    method = chosen.main if selector is None else selector
    # An unknown method is an error before anything is extracted.
    chosen.classifier(method)
    with exclusive(target):
        # Translated labels change the hash of a manifest, and the model knows the one with its own labels.
        images = evaluation.held_out(chosen, labeled, store, target / "tokens", part, trained_in, original.hash)
        run = _begin_evaluation(target, images, manifest, chosen.train_config)
        about = {
            "model": "a model in memory" if folder is None else os.path.relpath(folder, target),
            "mapping": None if mapping is None else dict(mapping),
            "own": evaluation.own_validation(trained_in, method, shares),
        }
        evaluation.evaluate_model(run, chosen, images, original, method, shares, about, by=by)
    return run


def evaluate_kept(
    kept: Path | str,
    manifest: AnyManifest,
    out: Path | str,
    store: AnyStore | None = None,
    part: Part = "auto",
    by: Sequence[str] = (),
) -> Run:
    """Judge a method that was made without this package by a table of the patches that it kept, next to the controls.

    Args:
        kept: Parquet file with the columns `image_id` and `kept`, and optionally `view`, `budget`, `scores` and `p_<class>`, such
            as `mtb route` and `mtb predict` write. Its name is that of the method.
        manifest: The images, with masks.
        out: The run directory to write.
        store: Tokens of the images on the grid of the table; None reads them with the embedded backbone into `out/tokens`.
        part: Which images; 'auto' takes the validation images, and all images where there are none.
        by: Further columns of the manifest to show results by.

    Returns:
        The run: `.results`, `.predictions`, `.report()`.

    Raises:
        RequestError: The table does not fit the manifest; the message says where.
    """
    target, original = Path(out), _opened(manifest)
    if part == "auto":
        part = "val" if (original.rows["split"] == "val").any() else "all"
    wanted = original if part == "all" else original.part(part)
    _check_evaluation(target, wanted, by)
    tables = {AS_IS: evaluation.read_kept(kept, wanted)}
    off_center = evaluation.has_off_center(kept)
    with exclusive(target):
        images = evaluation.images_of_table(tables[AS_IS], wanted, store, target / "tokens", part, off_center)
        if off_center:
            if not len(images.off_center):
                advice = 'Extract them with `mtb extract` and `views="off-center"`.'
                raise RequestError(f"{kept} has off-center views, but the store {images.store.path} has none. {advice}")
            shown = {images.store.ids[row] for row in images.off_center}
            crops = wanted.take([row for row, name in enumerate(wanted.ids) if name in shown])
            tables[OFF_CENTER] = evaluation.read_kept(kept, crops, OFF_CENTER)
            # The controls are evaluated at one list of budgets, on both views.
            if list(tables[OFF_CENTER].kept) != list(tables[AS_IS].kept):
                raise RequestError(f"{kept} has other budgets for off-center views than for original images.")
        run = _begin_evaluation(target, images, manifest, TrainConfig())
        evaluation.evaluate_kept(run, tables, images, original, by)
    return run


def _check_evaluation(target: Path, manifest: Manifest, by: Sequence[str]) -> None:
    """Reject an evaluation into the run of a training, and strata that the manifest does not have, before anything is extracted."""
    if (target / FILE).exists() and Run(target).evaluation is None:
        raise RequestError(f"{target} is the run of a training. Pass another `out` for the evaluation.")
    column_strata(manifest, by)


def _begin_evaluation(target: Path, images: evaluation.HeldOut, manifest: AnyManifest, config: TrainConfig) -> Run:
    """Begin a run whose manifest is the one that was given, with its own labels and all of its images."""
    run = Run.begin(target, images.manifest, images.store, config)
    if isinstance(manifest, Manifest):
        manifest.write(run.manifest_path)
    else:
        run.manifest_path = Path(manifest).resolve()
    return run


def demo(out: Path | str = "runs/demo", n: int = 1000, seed: int = 0, epochs: int | None = None) -> Path:
    """Run the whole product on drawn images: the packaged router, then a training; a demo that was stopped resumes.

    Args:
        out: The run directory.
        n: Number of images.
        seed: Seed of the drawings.
        epochs: Fewer epochs for a quick look. Default: as in the presets.

    Returns:
        The path of the report.
    """
    from medtokenbudget.data.synthetic import Drawings, synthetic_manifest

    out = Path(out)
    # Off the center, where keeping the middle of the image does not help.
    lesions = Drawings(8, seed=5, off_center=True)
    say(f"1 of 3: the packaged router on {lesions.n} drawn lesions that are not in the center ...")
    samples = synthetic_manifest(out / "router" / "samples", lesions)
    routed = route_files(samples, out / "router" / "routed", config=RouteConfig(overlay=True))
    first = min((out / "router" / "routed" / "overlays").iterdir())
    shares = {name: f"{retention.of_ceiling:.0%}" for name, retention in routed.retention.items()}
    say(
        f"  Of the lesion that fits 76 of 256 patches, the router keeps {shares['router']}, the center of the image "
        f"{shares['center']}, chance {shares['random']}.\n  Look at {first} and the pictures next to it while the rest runs."
    )
    say("2 of 3: a router and heads of our own, trained on drawn images (minutes) ...")
    manifest, store = out / "data" / "manifest.parquet", out / "tokens"
    if not manifest.exists():
        say(f"  Drawing {n} dermoscopic images ...")
        synthetic_manifest(out / "data", Drawings(n, seed), workers=os.cpu_count() or 1)
    say("  Extracting tokens with the embedded backbone ...")
    extract(manifest, store, "embedded", views="off-center")
    config = preset("paper") if epochs is None else preset("paper", epochs=epochs, head_epochs=epochs, min_steps=0)
    run = Run.begin(out, manifest, store, config)
    study = Study("main", supported_methods(run, default_methods()), budgets=BUDGETS)
    say(f"  Training {len(study.methods)} methods and evaluating them at {len(study.budgets)} budgets ...")
    sweeping.run_studies(run, [study])
    save_model(run)
    say("3 of 3: the report ...")
    return report(out)


def save_model(run: Run, trained: Mapping[Unit, RoutedClassifier] = MappingProxyType({})) -> Path | None:
    """Save the main method of a run and its other classifiers, all of the first seed, as one model folder.

    Classifiers that are not in `trained` are read from their units. Returns None if the run has no learned method.
    """
    if run.main is None:
        return None
    with exclusive(run.path):
        classifiers: dict[str, RoutedClassifier] = {}
        for method in map(Method.parse, run.methods):
            unit = Unit(method, run.seeds[0])
            # An ablation has no training of its own, and a selector that reads masks (the oracle) cannot predict.
            usable = method.ablation is None and not {*NOT_FROM_BACKBONE} & {*selector_class(method.selector).requires}
            if usable and unit.name in run.units:
                classifiers[str(method)] = trained.get(unit) or sweeping.load_unit(run, unit)
        store, config = run.store, train_config_from_dict(run.methods[run.main]["config"])
        rows = TrainingRows.of(run.manifest, store, config)
        # What the tokens were made with: the heads fit no other backbone.
        fingerprint, weights = store.config["backbone"], store.config["weights"]
        backbone = BackboneConfig(
            weights=None if weights is None else Path(weights),
            **{name: fingerprint[name] for name in ("name", "image_size", "layer", "attention")},
        )
        about = {name: getattr(run, name) for name in ("dataset", "seeds", "versions", "hashes", "studies")}
        model = MedTokenBudget(
            backbone,
            fingerprint,
            run.classes,
            classifiers,
            config,
            main=run.main,
            info={"run": about | {"masks": run.counts["train"]["masks"]}},
            scout=None if store.early is None else load(store.path / ROUTER),
            # Familiar is what the router has seen.
            familiarity=fit_familiarity(store, np.concatenate([rows.train, rows.views]), run.seeds[0]),
        )
        model.card = card_text(run, model)
        return model.save_pretrained(run.path / "model")


def _opened(manifest: AnyManifest) -> Manifest:
    return manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
