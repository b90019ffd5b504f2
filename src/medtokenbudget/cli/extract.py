"""`mtb extract`: run the backbone over a manifest and write a store of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.cli.parsing import add_config, command_parser, pick, require_effect
from medtokenbudget.config import BackboneConfig, Budget, ExtractConfig
from medtokenbudget.errors import RequestError, WorkError

EXAMPLE = "mtb extract isic.parquet --store stores/isic --weights dinov2_vitb14.safetensors --views off-center"


def main(arguments: list[str]) -> int:
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
        "--budget", type=Budget | None, default=None, help="With --route: share of the patches to keep, 0.3 or 30%. Default: 0.3."
    )
    parser.add_argument("--verify", action="store_true", help="Compare all shards and images with their stored hashes at the end.")
    given = parser.parse_args(arguments)
    return _run(given)


def _run(given: Any) -> int:
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
    print(_summary(store, given.manifest))
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
    budget = 0.3 if given.budget is None else given.budget
    return EarlyRouting(router, way, budget, block)


def _summary(store: Any, manifest: Path) -> str:
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
