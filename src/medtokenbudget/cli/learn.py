"""Commands that learn from a manifest and its store: `extract`, `train`, `sweep`, `reproduce`, `calibrate`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.cli import config_file
from medtokenbudget.cli.options import CommandParser, add_config, add_part, command_parser, pick, require_effect, share
from medtokenbudget.config import (
    DEFAULT_BUDGET,
    DEFAULT_METHODS,
    DEFAULT_SELECTOR,
    HEADLINE_BUDGET,
    PRESETS,
    SEEDS,
    BackboneConfig,
    Budget,
    ContextConfig,
    CurriculumConfig,
    ExtractConfig,
    LATSConfig,
    LossWeights,
    Parallel,
    RouterConfig,
    Seed,
    TrainConfig,
    preset,
    to_dict,
    train_config_from_dict,
)
from medtokenbudget.errors import RequestError, WorkError
from medtokenbudget.files import dotted

EXAMPLE = "mtb extract isic.parquet --store stores/isic --weights dinov2_vitb14.safetensors --views off-center"


def extract(arguments: list[str]) -> int:
    parser = command_parser(
        "extract",
        "Run the frozen backbone once over all images of a manifest and store their tokens. Run the same command again to resume.",
        EXAMPLE,
    )
    parser.add_argument("manifest", type=Path, help="Manifest created by `mtb data`.")
    parser.add_argument("--store", type=Path, required=True, help="Folder of the token store. An incomplete store is resumed.")
    parser.add_argument(
        "--backbone",
        type=str,
        default=BackboneConfig.name,
        help="Name of a timm vision transformer, 'embedded', or a folder written by tools/distill.py.",
    )
    add_config(parser, BackboneConfig, "Backbone", first={"weights"}, skip={"name"})
    add_config(parser, ExtractConfig, "Extraction", first={"views", "device"})
    cluster = parser.section("Clusters and job arrays")
    cluster.add_argument("--engine", type=Literal["local", "ray"], default="local", help="Where to run: on this machine or on Ray.")
    cluster.add_argument("--address", type=str | None, default=None, help="Address of a running Ray cluster: auto or host:port.")
    cluster.add_argument(
        "--shards",
        type=str | None,
        metavar="I/N",
        default=None,
        help="For job arrays: extract only every N-th shard, starting at I.",
    )
    early = parser.section("Early routing")
    early.add_argument(
        "--route",
        type=str | None,
        default=None,
        help="Run the backbone where the lesion is. scout: on the patches that the router chose from the image; block:4: on all "
        "patches before block 4, then on those that the router chose from its tokens. "
        "Recommended: scout, or block:4 with a scorer that was trained on block 3; read a middle block (--layer 6 of a ViT-S/14).",
    )
    early.add_argument(
        "--router",
        type=str | None,
        default=None,
        help="What chooses for --route: a run, a model folder, a hub id or 'dermoscopy'; or, to compare with, a selector that "
        "needs no training, such as evit, frequency or center.",
    )
    early.add_argument(
        "--budget",
        type=Budget | None,
        default=None,
        help=f"With --route: share of the patches to keep. Default: {DEFAULT_BUDGET}.",
    )
    parser.add_argument("--verify", action="store_true", help="Compare all shards and images with their stored hashes at the end.")
    given = parser.parse_args(arguments)
    return _extract(given)


def _extract(given: Any) -> int:
    shards = None if given.shards is None else parse_shards(given.shards)
    require_effect(given, given.engine == "ray", "--engine ray", "address")
    require_effect(given, given.views == "off-center", "--views off-center", "crops", "view_seed")
    if (given.route is None) != (given.router is None):
        raise RequestError("--route and --router must be used together: the way to route, and the model that chooses.")
    if given.budget is not None and given.route is None:
        raise RequestError("--budget is only used with --route. Drop it: a store of all patches serves every budget.")

    from medtokenbudget.backbone import extract
    from medtokenbudget.data import Manifest

    manifest = Manifest.read(given.manifest)
    store = extract(
        manifest,
        given.store,
        replace(pick(given, BackboneConfig), name=given.backbone),
        pick(given, ExtractConfig),
        engine=given.engine,
        shards=shards,
        address=given.address,
        early=None if given.route is None else _early(given),
    )
    if given.verify:
        store.verify(manifest)
    print(_store_summary(store, given.manifest))
    if store.errors and not len(store) and not store.missing:
        raise WorkError(f"{store.path} has no rows: every image was skipped. The first reason: {store.errors[0].reason}")
    return 0


def parse_shards(text: str) -> tuple[int, int]:
    """Parse 'I/N' to two numbers."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise RequestError(f"--shards must be I/N, such as 0/8 for the first of eight jobs, got '{text}'.")
    return int(parts[0]), int(parts[1])


def _early(given: Any) -> Any:
    from medtokenbudget.model import EarlyRouting, load
    from medtokenbudget.model.early import is_untrained_router, parse_route, untrained_router

    way, block = parse_route(given.route)
    if is_untrained_router(given.router):
        router = untrained_router(given.router, way, replace(pick(given, BackboneConfig), name=given.backbone), block)
    else:
        router = load(given.router, device=given.device)
    budget = DEFAULT_BUDGET if given.budget is None else given.budget
    return EarlyRouting(router, way, budget, block)


def _store_summary(store: Any, manifest: Path) -> str:
    lines = []
    if store.errors:
        where = f"{store.path / 'errors.jsonl'} lists" if not store.missing else "the JSON files of the shards list"
        lines.append(
            f"Skipped {len(store.errors)} of {len(store) + len(store.errors)} rows; {where} the reasons. "
            f"The first: {store.errors[0].reason}"
        )
    if store.missing:
        of = len(store.shards)
        lines.append(
            f"{store.path} is incomplete: {len(store.missing)} of {of} shards are missing. "
            "Run the other jobs, or this command without --shards."
        )
    else:
        kept = "" if store.early is None else f", routed early ({store.early['way']}, {store.per_image} of {store.n} patches)"
        following = f" Next: mtb train {manifest} --store {store.path} --out runs/first" if len(store) else ""
        lines.append(f"Wrote {store.path}: {len(store)} rows{kept}.{following}")
    return "\n".join(lines)


def train(arguments: list[str]) -> int:
    parser = command_parser(
        "train",
        "Train one router and its head on a store of tokens, evaluate it beside the controls `center` and `random`, and save "
        "it as a model. Without class labels the router learns from masks alone and has no head. If it is stopped, the same "
        "command resumes.",
        "mtb train isic.parquet --store tokens --out runs/first",
    )
    add_run(parser)
    parser.add_argument(
        "--head",
        type=Literal["auto", "none"],
        default="auto",
        help="'none' ignores class labels and trains the router from masks alone, for `mtb route`; so does 'auto' without labels.",
    )
    parser.add_argument("--selector", default=DEFAULT_SELECTOR, help="Selector to train: any that learns (docs/selectors.md).")
    add_training(parser, arguments, "lesion-first")
    options = parser.parse_args(arguments)

    from medtokenbudget.api import train
    from medtokenbudget.progress import say
    from medtokenbudget.runs.run import AS_IS, record_command
    from medtokenbudget.runs.sweep import require_complete

    config = training_config(options)
    run = train(options.manifest, options.store, options.out, config, options.selector, options.head)
    record_command(options.out, "train", arguments)
    ours = run.results[(run.results["method"] == run.info.main) & (run.results["view"] == AS_IS)]
    row = ours.iloc[int((ours["budget"] - HEADLINE_BUDGET).abs().to_numpy().argmin())]
    found = []
    if row["n"]:
        found.append(f"accuracy {row['accuracy']:.1%} (n = {row['n']})")
    if row["n_masked"]:
        found.append(f"{row['retention_of_ceiling']:.1%} of the lesion that fits the budget kept (n = {row['n_masked']})")
    say(f"{run.info.main} at budget {row['budget']:g}: {', '.join(found) or 'nothing to measure it on'}.")
    model = options.out / "model"
    following = f"mtb explore {model}" if run.info.classes else f"mtb route IMAGES --model {model} --out routed"
    say(f"Model saved in {model}. Next: mtb report {options.out} or {following}")
    require_complete(run.info)
    return 0


def sweep(arguments: list[str]) -> int:
    parser = command_parser(
        "sweep",
        "Train and evaluate methods x budgets x seeds. If it is stopped, the same command resumes.",
        "mtb sweep isic.parquet --store tokens --out runs/sweep --methods lats:lesion-first random center --seeds 42 43 44",
    )
    add_run(parser)
    parser.add_argument(
        "--methods",
        metavar="METHOD",
        nargs="+",
        default=None,
        help="Methods as selector, selector:variant or selector+head:variant, such as lats:lesion-first. Default: "
        + " ".join(DEFAULT_METHODS)
        + ".",
    )
    parser.add_argument(
        "--heads",
        metavar="HEAD",
        nargs="+",
        default=None,
        help="Heads to combine every method with, such as mlp abmil. A method that names its head, as selector+head, keeps it.",
    )
    parser.add_argument("--seeds", nargs="+", type=Seed, default=[SEEDS[0]], help="Random seeds: one training per method and seed.")
    add_engine(parser)
    add_training(parser, arguments, "lesion-first", skip={"seed"})
    options = parser.parse_args(arguments)
    check_engine(options)

    from medtokenbudget.api import sweep
    from medtokenbudget.progress import say
    from medtokenbudget.runs.run import record_command
    from medtokenbudget.runs.sweep import require_complete

    config = training_config(options)
    run = sweep(
        options.manifest,
        options.store,
        options.out,
        methods=options.methods,
        seeds=options.seeds,
        config=config,
        engine=options.engine,
        jobs=options.jobs,
        address=options.address,
        heads=options.heads,
    )
    record_command(options.out, "sweep", arguments)
    say(f"{len(run.results)} rows in {options.out / 'results.csv'}. Next: mtb report {options.out}")
    require_complete(run.info)
    return 0


def reproduce(arguments: list[str]) -> int:
    parser = command_parser(
        "reproduce",
        "Run the paper's studies (main, robustness, mask-free, signals, curriculum, toggles, kvasir, subset) and ours (epochs, "
        "center-bias, recipe, zoo), and print the paper's numbers next to ours. The same command resumes it.",
        "mtb reproduce isic.parquet --store tokens --out runs/paper --study main robustness",
    )
    add_run(parser)
    parser.add_argument(
        "--study",
        nargs="+",
        default=["all"],
        help="Studies to run; 'all' is every one that fits the data set, except zoo.",
    )
    add_engine(parser)
    add_training(parser, arguments, "paper", skip={"seed"}, protocol="paper")
    options = parser.parse_args(arguments)
    check_engine(options)

    from medtokenbudget.api import reproduce
    from medtokenbudget.progress import say
    from medtokenbudget.runs.paper import comparison
    from medtokenbudget.runs.run import record_command
    from medtokenbudget.runs.sweep import require_complete

    run = reproduce(
        options.manifest,
        options.store,
        options.out,
        study=options.study,
        config=training_config(options),
        engine=options.engine,
        jobs=options.jobs,
        address=options.address,
    )
    record_command(options.out, "reproduce", arguments)
    print(comparison(run.results))
    say(f"{len(run.results)} rows in {options.out / 'results.csv'}. Next: mtb report {options.out}")
    require_complete(run.info)
    return 0


def calibrate(arguments: list[str]) -> int:
    parser = command_parser(
        "calibrate",
        "Pick the threshold with which a model keeps a promised share of the lesion, by conformal risk control on images with "
        "masks that it was not trained on, and save it in the model. `mtb predict`, `mtb route` and the explorer then take "
        "--retention instead of a budget: small lesions get few tokens, large ones many.",
        "mtb calibrate runs/first photos.parquet --store tokens --retention 0.95",
    )
    parser.add_argument("model", help="Run directory, model folder or hub id (owner/name).")
    parser.add_argument("manifest", type=Path, help="Images with masks (.parquet); their groups are the exchangeable units.")
    parser.add_argument("--retention", type=share, required=True, help="Share of the lesion to promise, such as 0.95 or 95%.")
    parser.add_argument(
        "--coverage",
        type=share,
        default=None,
        help="Promise the retention in this share of the images, such as 0.9. Default: on average.",
    )
    parser.add_argument(
        "--cap", type=Budget | None, metavar="SHARE", default=None, help="Largest share of the patches that an image may keep."
    )
    parser.add_argument("--store", type=Path | None, default=None, help="Tokens of the images. Default: extract them.")
    parser.add_argument("--selector", type=str | None, default=None, help="Method to calibrate. Default: the model's main method.")
    parser.add_argument(
        "--part",
        type=Literal["auto", "val", "select", "train", "all"],
        default="auto",
        help="Images to calibrate on. auto: the validation images of the manifest that the model was trained with, all of others.",
    )
    parser.add_argument(
        "--out", type=Path | None, default=None, help="Folder for a calibrated copy. Default: save it in the model folder."
    )
    options = parser.parse_args(arguments)

    from medtokenbudget.api import calibrate
    from medtokenbudget.progress import say

    found = calibrate(
        options.model,
        options.manifest,
        options.retention,
        coverage=options.coverage,
        cap=options.cap,
        store=options.store,
        selector=options.selector,
        part=options.part,
        out=options.out,
    )
    say(
        f"{found.selector} keeps {found}, on images like the {found.images:,} of “{found.dataset}” ({found.groups:,} groups). "
        f"There {found.tokens:.1f} patches on average (a score of {found.threshold:.4g} or more) keep {found.kept:.1%}."
    )
    where = options.out or options.model
    asked = f"--retention {found.retention:g}" + ("" if found.coverage is None else f" --coverage {found.coverage:g}")
    say(f"Saved in {where}. Next: mtb predict {where} IMAGES {asked} --out predictions.csv")
    return 0


FIRST = ("epochs", "budgets", "seed", "device")
"""Fields of `TrainConfig` that the help shows before all groups."""


def add_training(parser: CommandParser, arguments: list[str], default: str, skip: Collection[str] = (), **changes: Any) -> None:
    """Add `--preset` and the fields of `TrainConfig`, with the defaults of the preset that `arguments` name.

    Args:
        parser: The parser of a command.
        arguments: The words after the command.
        default: The preset to use if none is named.
        skip: Fields that are no options of this command and keep the value of the preset.
        **changes: Fields of the preset whose default is another one for this command.
    """
    parser.add_argument("--preset", default=default, choices=sorted(PRESETS), help="Settings that the options below change.")
    add_config(parser, TrainConfig, "Training", first=FIRST, skip={"given", *skip})
    add_part(parser, ContextConfig, "context", "Context scorer")
    add_part(parser, LATSConfig, "lats", "LATS scorer")
    add_part(parser, RouterConfig, "router", "Router")
    add_part(parser, CurriculumConfig, "curriculum", "Budget curriculum of the joint recipe")
    add_part(parser, LossWeights, "losses", "Losses")
    name = _named(arguments)
    # An unknown name is rejected when the options are parsed.
    parser.set_defaults(**dotted(to_dict(preset(name if name in PRESETS else default, **changes))))


def add_run(parser: CommandParser) -> None:
    """Add what a run is made from and where it goes."""
    parser.add_argument("manifest", type=Path, help="Manifest whose images are in the store.")
    parser.add_argument("--store", type=Path, required=True, help="Store of tokens, written by `mtb extract`.")
    parser.add_argument("--out", type=Path, required=True, help="Run directory to write.")


def add_engine(parser: CommandParser) -> None:
    """Add where and how the units of a sweep run."""
    section = parser.section("Running")
    section.add_argument(
        "--jobs", type=Parallel, default=0, help="Units (a method with one seed) to run at the same time; 0 runs one per core."
    )
    section.add_argument("--engine", type=Literal["local", "ray"], default="local", help="Local processes or a Ray cluster.")
    section.add_argument("--address", type=str | None, default=None, help="Address of a running Ray cluster: auto or host:port.")


def check_engine(options: Namespace) -> None:
    """Reject options of the other engine: a cluster decides by itself how many units run at the same time."""
    require_effect(options, options.engine == "ray", "--engine ray", "address")
    require_effect(options, options.engine == "local", "--engine local", "jobs")


def training_config(options: Namespace) -> TrainConfig:
    """Build the training configuration from parsed options; it knows which of them were given."""
    values: dict[str, Any] = {}
    names = dotted(to_dict(TrainConfig()))
    for name in names:
        *part, field = name.split(".")
        (values.setdefault(part[0], {}) if part else values)[field] = getattr(options, name)
    return replace(train_config_from_dict(values), given=options.given & names.keys())


def _named(arguments: list[str]) -> str | None:
    """The preset that the command line or else its configuration file names, before anything is parsed."""
    file = config_file.named(arguments)
    named = config_file.value_of("--preset", arguments)
    return named if named is not None or file is None else config_file.read(file).get("preset")
