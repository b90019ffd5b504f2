"""`mtb extract`: fill a store with the tokens of a manifest; again after a crash, it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from medtokenbudget.cli.parsing import add_config, command_parser, pick
from medtokenbudget.config import BackboneConfig, Budget, ExtractConfig
from medtokenbudget.errors import RequestError

EXAMPLE = "mtb extract isic.parquet --store stores/isic --weights dinov2_vitb14.safetensors --views off-center"


def main(arguments: list[str]) -> int:
    parser = command_parser("extract", "Run the frozen backbone once over all images and fill a store of tokens.", EXAMPLE)
    parser.add_argument("manifest", type=Path, help="Manifest made by `mtb data`.")
    parser.add_argument("--store", type=Path, required=True, help="Folder of the store; one that was begun is continued.")
    parser.add_argument(
        "--backbone",
        type=str,
        default=BackboneConfig.name,
        help="A timm vision transformer, 'embedded', or a folder of mtb distill.",
    )
    add_config(parser, BackboneConfig, "Backbone", first={"weights"}, skip={"name"})
    add_config(parser, ExtractConfig, "Extraction", first={"views", "device"})
    cluster = parser.section("Clusters and job arrays")
    cluster.add_argument("--engine", type=Literal["local", "ray"], default="local", help="This machine, or a Ray cluster.")
    cluster.add_argument("--address", type=str | None, default=None, help="Address of a running Ray cluster ('auto', host:port).")
    cluster.add_argument(
        "--shards", type=str | None, default=None, help="I/N: extract every N-th shard, starting at I, for job arrays."
    )
    routed = parser.section("Routed tokens")
    routed.add_argument(
        "--keep", type=Literal["all", "routed"], default="all", help="All patches, or only those that a model keeps."
    )
    routed.add_argument("--model", type=Path | None, default=None, help="The trained model of --keep routed.")
    routed.add_argument("--budget", type=Budget | None, default=None, help="Share of the patches that --keep routed keeps.")
    parser.add_argument(
        "--verify", action="store_true", help="At the end, compare every shard and every image with the stored hashes."
    )
    given = parser.parse_args(arguments)
    return _run(given)


def _run(given: Any) -> int:
    shards = None if given.shards is None else parse_shards(given.shards)
    if given.address is not None and given.engine != "ray":
        raise RequestError("--address belongs to a Ray cluster: add --engine ray.")
    if (given.keep == "routed") != (given.model is not None) or (given.keep == "routed") != (given.budget is not None):
        raise RequestError("--keep routed, --model M and --budget B go together.")

    from medtokenbudget.data import Manifest
    from medtokenbudget.features import extract

    route, fingerprint = _route(given.model, given.budget) if given.keep == "routed" else (None, None)
    manifest = Manifest.read(given.manifest)
    store = extract(
        manifest,
        given.store,
        replace(pick(given, BackboneConfig), name=given.backbone),
        pick(given, ExtractConfig),
        engine=given.engine,
        shards=shards,
        address=given.address,
        route=route,
        route_fingerprint=fingerprint,
    )
    if given.verify:
        store.verify(manifest)
    print(_summary(store, given.manifest))
    return 0


def parse_shards(text: str) -> tuple[int, int]:
    """'I/N' as two numbers."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise RequestError(f"--shards takes I/N, such as 0/8 for the first of eight jobs, got '{text}'.")
    return int(parts[0]), int(parts[1])


def _route(path: Path, budget: float) -> tuple[Any, dict[str, Any]]:
    from medtokenbudget.model import load

    model = load(path)
    # Without the name, which is a path where the backbone is a folder; the hash of the weights says more.
    backbone = {key: value for key, value in model.backbone_fingerprint.items() if key != "name"}
    return model.router(budget), {"model": model.fingerprint, "budget": budget, "backbone": backbone}


def _summary(store: Any, manifest: Path) -> str:
    lines = []
    if store.errors:
        where = f"listed in {store.path / 'errors.jsonl'}" if not store.missing else "listed in the shards' sidecars"
        lines.append(f"{len(store.errors)} of {len(store) + len(store.errors)} rows are left out, {where} with the reason.")
    if store.missing:
        of = store.config["shards"]
        lines.append(
            f"{store.path}: {len(store.missing)} of {of} shards are missing. Run the other jobs, or this command without --shards."
        )
    elif store.config["keep"] == "patches":
        lines.append(f"{store.path}: {len(store)} rows. Next: mtb train {manifest} --store {store.path} --out runs/first")
    else:
        lines.append(f"{store.path}: {len(store)} rows of routed tokens.")
    return "\n".join(lines)
