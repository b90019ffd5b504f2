"""Commands that learn from a manifest and its store: `extract`, `train`, `sweep`, `reproduce`, `calibrate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tyro.conf import Positional

from medtokenbudget.cli.options import Command, Engine
from medtokenbudget.config import (
    DEFAULT_BUDGET,
    DEFAULT_METHODS,
    DEFAULT_SELECTOR,
    HEADLINE_BUDGET,
    PRESETS,
    SEEDS,
    BackboneConfig,
    Budget,
    ExtractConfig,
    Parallel,
    Seed,
    Settings,
    Share,
    TrainConfig,
    preset,
    settings_of,
)
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.runtime import say

if TYPE_CHECKING:
    from medtokenbudget.backbone import FeatureStore
    from medtokenbudget.backbone.extract import PatchScorer
    from medtokenbudget.data import Manifest
    from medtokenbudget.model import EarlyRouting
    from medtokenbudget.runs.run import Run


@dataclass(frozen=True)
class Cluster(Engine):
    """For clusters and job arrays."""

    shards: str | None = None
    """For job arrays, I/N: extract only every N-th shard, starting at I."""


@dataclass(frozen=True)
class RouteEarly(Settings):
    """Run the backbone only where the lesion is."""

    route: str | None = None
    """scout: run the backbone on the patches that the router chose from the image; block:4: on all patches before block 4, then on
    those that the router chose from its tokens. Recommended: scout, or block:4 with a scorer that was trained on block 3; read a
    middle block (`layer=6` of a ViT-S/14)."""
    router: str | None = None
    """What chooses for `route`: a run, a model folder, a hub id or 'dermoscopy'; or, to compare with, a selector that needs no
    training, such as evit, frequency or center."""
    budget: Budget | None = None
    """With `route`: share of the patches to keep, such as 0.3 or 30%. Default: {DEFAULT_BUDGET}."""


@dataclass(frozen=True, kw_only=True)
class Extract(Command):
    """Run the frozen backbone once over all images of a manifest and store their tokens.

    If it is stopped, the same command resumes.
    """

    example = "mtb extract isic.parquet --store stores/isic --weights dinov2_vitb14.safetensors --views off-center"
    hidden = frozenset({"name"})
    first = frozenset({"manifest", "store", "backbone", "weights", "views", "crops", "route", "router", "budget", "device"})

    manifest: Positional[Path]
    """Manifest created by `mtb data`."""
    store: Path
    """Folder of the token store. An incomplete store is resumed."""
    backbone: str = BackboneConfig.name
    """Name of a timm vision transformer, 'hf:' and a model of transformers, 'panderm-base', 'embedded', or a folder: see
    docs/backbone.md."""
    segmenter: str | None = None
    """Run or model folder of a segmenter (`mtb train` with `preset="scout"`) that was trained on this manifest. Its scores of every
    row are stored for the control of that name."""
    verify: bool = False
    """Compare all shards and images with their stored hashes at the end."""
    transformer: BackboneConfig
    extraction: ExtractConfig
    cluster: Cluster
    early: RouteEarly

    def run(self) -> None:
        shards = None if self.cluster.shards is None else parse_shards(self.cluster.shards)
        self.require_effect(self.cluster.engine == "ray", '`engine="ray"`', "address")
        drawn = self.extraction.views in ("off-center", "augmented")
        self.require_effect(drawn, '`views="off-center"` or `views="augmented"`', "crops", "view_seed")
        route, router = self.early.route, self.early.router
        if (route is None) != (router is None):
            raise RequestError("`route` and `router` must be used together: the way to route, and the model that chooses.")
        if self.early.budget is not None and route is None:
            raise RequestError("`budget` is only used with `route`. Drop it: a store of all patches serves every budget.")

        from medtokenbudget.backbone import FeatureStore, extract
        from medtokenbudget.backbone.extract import add_segmentation
        from medtokenbudget.data import Manifest

        if self.segmenter is not None and (shards is not None or route is not None):
            raise RequestError("`segmenter` scores all patches of a complete store. Leave out `shards` and `route`.")
        manifest = Manifest.read(self.manifest)
        backbone = replace(self.transformer, name=self.backbone)
        early = None if route is None or router is None else self._early_routing(route, router, backbone)
        engine, address = self.cluster.engine, self.cluster.address
        store = extract(manifest, self.store, backbone, self.extraction, engine=engine, shards=shards, address=address, early=early)
        if self.segmenter is not None:
            add_segmentation(store, manifest, self._segmenter(self.segmenter, manifest), self.extraction)
            store = FeatureStore.open(store.path, manifest)
        if self.verify:
            store.verify(manifest)
        print(_store_summary(store, self.manifest))
        if store.errors and not len(store) and not store.missing:
            raise WorkError(f"{store.path} has no rows: every image was skipped. The first reason: {store.errors[0].reason}")

    def _segmenter(self, name: str, manifest: Manifest) -> PatchScorer:
        from medtokenbudget.backbone.extract import PatchScorer
        from medtokenbudget.model import load
        from medtokenbudget.routing import Ranker

        model = load(name, device=self.extraction.device)
        if model.info.get("run", {}).get("hashes", {}).get("manifest") not in (manifest.hash, manifest.without_labels().hash):
            raise RequestError(
                f"The segmenter {name} was trained with another manifest, so it may have seen validation images of this one. "
                'Train it with this manifest: `mtb train` with `preset="scout"` and `scout.plain=true`.'
            )
        selector, backbone = model.classifier().selector, model.backbone
        if not isinstance(selector, Ranker):
            raise RequestError(f"The model {name} does not rank patches, so it is no segmenter.")
        return PatchScorer(backbone, lambda pixels: selector.score(backbone.tokens(backbone.normalize(pixels))), model.fingerprint)

    def _early_routing(self, route: str, router: str, backbone: BackboneConfig) -> EarlyRouting:
        from medtokenbudget.model.early import EarlyRouting, find_router, parse_route

        way, block = parse_route(route)
        model = find_router(router, way, backbone, block, self.extraction.device)
        return EarlyRouting(model, way, self.early.budget or DEFAULT_BUDGET, block)


def parse_shards(text: str) -> tuple[int, int]:
    """Parse 'I/N' to two numbers."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise RequestError(f"`shards` must be I/N, such as 0/8 for the first of eight jobs, got '{text}'.")
    return int(parts[0]), int(parts[1])


def _store_summary(store: FeatureStore, manifest: Path) -> str:
    lines = []
    if store.errors:
        where = f"{store.path / 'errors.jsonl'} lists" if not store.missing else "the JSON files of the shards list"
        lines.append(
            f"Skipped {len(store.errors)} of {len(store) + len(store.errors)} rows; {where} the reasons. "
            f"The first: {store.errors[0].reason}"
        )
    if store.missing:
        lines.append(
            f"{store.path} is incomplete: {len(store.missing)} of {len(store.shards)} shards are missing. "
            "Run the other jobs, or this command without --shards."
        )
    else:
        kept = "" if store.early is None else f", routed early ({store.early['way']}, {store.per_image} of {store.n} patches)"
        following = f" Next: mtb train {manifest} --store {store.path} --out runs/first" if len(store) else ""
        lines.append(f"Wrote {store.path}: {len(store)} rows{kept}.{following}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class TrainingCommand(Command):
    """Base of the commands that train: what a run is made from, where it goes, and the settings of a training."""

    first = frozenset(
        {"manifest", "out", "store", "preset", "selector", "head", "controls", "epochs", "seed", "device"}
        | {"methods", "heads", "seeds", "study", "jobs"}
    )
    changes: ClassVar[dict[str, Any]] = {}
    """Fields of the preset whose default is another one for this command."""

    manifest: Positional[Path]
    """Images with their labels, masks and split."""
    out: Path
    """Run directory to write."""
    preset: Literal["lesion-first", "paper", "scout"] = "lesion-first"
    """Settings that the other options change."""
    training: TrainConfig

    @classmethod
    def defaults(cls, named: str | None) -> dict[str, Any]:
        # An unknown name is refused when the options are read.
        return settings_of(preset(named if named in PRESETS else cls.preset, **cls.changes))

    @property
    def config(self) -> TrainConfig:
        """The settings of the training, which know what the user chose."""
        return replace(self.training, given=self.given & settings_of(self.training).keys())


@dataclass(frozen=True, kw_only=True)
class Train(TrainingCommand):
    """Train a router and its head on a store of tokens, and save them as a model.

    The model is saved before heads of the controls are trained and evaluated next to it. Without class labels it learns from masks
    alone and has no head. With `preset="scout"` a small network learns from images and masks, without a store. If it is stopped,
    the same command resumes.
    """

    example = "mtb train isic.parquet --store tokens --out runs/first"

    store: Path | None = None
    """Store of tokens, written by `mtb extract`. Required, except with `preset="scout"`, which learns from the images."""
    head: Literal["auto", "none"] = "auto"
    """'none' ignores class labels and trains the router from masks alone, for `mtb route`; so does 'auto' without labels."""
    selector: str = DEFAULT_SELECTOR
    """Selector to train: any that learns (docs/selectors.md)."""
    controls: bool = True
    """'false' trains no heads for the controls (center, darkness, ...), to which the report compares the model."""

    def run(self) -> None:
        from medtokenbudget.api import train
        from medtokenbudget.runs.run import AS_IS
        from medtokenbudget.runs.sweep import require_complete

        run = train(self.manifest, self.store, self.out, self.config, self.selector, self.head, self.controls)
        run.record_command("train", self.words)
        ours = run.results[(run.results["method"] == run.main) & (run.results["view"] == AS_IS)]
        row = ours.iloc[int((ours["budget"] - HEADLINE_BUDGET).abs().to_numpy().argmin())]
        measured = []
        if row["n"]:
            measured.append(f"accuracy {row['accuracy']:.1%} (n = {row['n']})")
        if row["n_masked"]:
            measured.append(f"{row['retention_of_ceiling']:.1%} of the lesion that fits the budget kept (n = {row['n_masked']})")
        say(f"{run.main} at budget {row['budget']:g}: {', '.join(measured) or 'nothing to measure it on'}.")
        model = self.out / "model"
        following = f"mtb explore {model}" if run.classes else f"mtb route IMAGES --model {model} --out routed"
        say(f"Model saved in {model}. Next: mtb report {self.out} or {following}")
        if self.training.recipe != "scout":  # which has no units
            require_complete(run)


@dataclass(frozen=True)
class Running(Engine):
    """Where and how the trainings run."""

    jobs: Parallel = 0
    """Units (a method with one seed) to run at the same time; 0 runs one per core."""


@dataclass(frozen=True, kw_only=True)
class ManyTrainings(TrainingCommand):
    """Base of `sweep` and `reproduce`."""

    hidden = frozenset({"seed"})

    store: Path
    """Store of tokens, written by `mtb extract`."""
    running: Running

    def execution(self) -> dict[str, Any]:
        """Return where the trainings run, or reject options of the other engine: a cluster itself decides how many run at once."""
        self.require_effect(self.running.engine == "ray", '`engine="ray"`', "address")
        self.require_effect(self.running.engine == "local", '`engine="local"`', "jobs")
        return asdict(self.running)

    def finish(self, run: Run, name: str) -> None:
        """Record the command in the run, and say where the results are."""
        from medtokenbudget.runs.sweep import require_complete

        run.record_command(name, self.words)
        say(f"{len(run.results)} rows in {self.out / 'results.csv'}. Next: mtb report {self.out}")
        require_complete(run)


@dataclass(frozen=True, kw_only=True)
class Sweep(ManyTrainings):
    """Train and evaluate several methods at several budgets and seeds.

    If it is stopped, the same command resumes.
    """

    example = "mtb sweep isic.parquet --store tokens --out runs/sweep --methods lats:lesion-first random center --seeds 42 43 44"

    methods: tuple[str, ...] = DEFAULT_METHODS
    """Methods as selector, selector:variant or selector+head:variant, such as lats:lesion-first; or 'protocol': the rows, budgets
    and seeds of the benchmark protocol."""
    heads: tuple[str, ...] | None = None
    """Heads to combine every method with, such as mlp abmil. A method that names its head, as selector+head, keeps it."""
    seeds: tuple[Seed, ...] = (SEEDS[0],)
    """Random seeds. Every method is trained once per seed."""

    def run(self) -> None:
        execution = self.execution()

        from medtokenbudget.api import sweep

        methods, seeds = ((getattr(self, name) if name in self.given else None) for name in ("methods", "seeds"))
        run = sweep(self.manifest, self.store, self.out, methods, seeds=seeds, config=self.config, heads=self.heads, **execution)
        self.finish(run, "sweep")


@dataclass(frozen=True, kw_only=True)
class Reproduce(ManyTrainings):
    """Run the paper's studies and compare with its numbers.

    If it is stopped, the same command resumes.
    """

    example = "mtb reproduce isic.parquet --store tokens --out runs/paper --study main robustness"
    changes: ClassVar[dict[str, Any]] = {"protocol": "paper"}

    study: tuple[str, ...] = ("all",)
    """Studies to run; 'all' is every one that fits the data set, except zoo. An unknown name lists all of them."""
    preset: Literal["lesion-first", "paper", "scout"] = "paper"

    def run(self) -> None:
        execution = self.execution()

        from medtokenbudget.api import reproduce
        from medtokenbudget.runs.paper import comparison

        run = reproduce(self.manifest, self.store, self.out, self.study, self.config, **execution)
        compared = comparison(run.results, run.source)
        print(compared or f"{run.dataset} is not a data set of the paper, so its numbers are not compared with these.")
        self.finish(run, "reproduce")


@dataclass(frozen=True, kw_only=True)
class Calibrate(Command):
    """Let a model keep a promised share of the lesion instead of a share of the patches.

    It picks the threshold by conformal risk control on images with masks that the model was not trained on, and saves it in the
    model. `mtb predict`, `mtb route` and the explorer then take --retention instead of a budget: small lesions get few tokens,
    large ones many.
    """

    example = "mtb calibrate photos.parquet --model runs/first --store tokens --retention 0.95"

    manifest: Positional[Path]
    """Images with masks (.parquet); their groups are the exchangeable units."""
    model: str
    """Run directory, model folder or hub id (owner/name)."""
    retention: Share
    """Share of the lesion to promise, such as 0.95 or 95%."""
    coverage: Share | None = None
    """Promise the retention in this share of the images, such as 0.9. Default: on average."""
    cap: Budget | None = None
    """Largest share of the patches that an image may keep."""
    store: Path | None = None
    """Tokens of the images. Default: extract them."""
    selector: str | None = None
    """Method to calibrate. Default: the model's main method."""
    part: Literal["auto", "val", "select", "train", "all"] = "auto"
    """Images to calibrate on. auto: the validation images of the manifest that the model was trained with, all of others."""
    out: Path | None = None
    """Folder for a calibrated copy. Default: save it in the model folder."""
    by: str | None = None
    """Keep the promise for each class, size, position, 'skin tone', hair, 'dark corners' or value of a column of the manifest, and
    show what each kept."""

    def run(self) -> None:
        from medtokenbudget.api import calibrate

        given = (self.retention, self.coverage, self.cap, self.store, self.selector, self.part, self.out, self.by)
        promise = calibrate(self.model, self.manifest, *given)
        if self.by is not None:
            rows = promise.table()
            widths = [max(map(len, column)) for column in zip(*rows)]
            print("\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows))
        say(
            f"{promise.selector} keeps {promise}, on images like the {promise.images:,} of “{promise.dataset}” "
            f"({promise.groups:,} groups). There {promise.tokens:.1f} patches on average keep {promise.kept:.1%}."
        )
        where = self.out or self.model
        asked = f"--retention {promise.retention:g}" + ("" if promise.coverage is None else f" --coverage {promise.coverage:g}")
        say(f"Saved in {where}. Next: mtb route IMAGES --model {where} {asked} --out routed")
