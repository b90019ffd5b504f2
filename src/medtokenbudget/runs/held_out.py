"""The images that a saved model is measured or calibrated on: tokens that fit it, and none that it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from medtokenbudget.config import ExtractConfig
from medtokenbudget.data import Manifest
from medtokenbudget.data.manifest import listed
from medtokenbudget.errors import MismatchError, RequestError
from medtokenbudget.runs.run import FILE, RunInfo
from medtokenbudget.backbone import FeatureStore, extract
from medtokenbudget.backbone.annotations import hashes_of, known_manifests
from medtokenbudget.backbone.views import IDENTITY, OFF_CENTER
from medtokenbudget.model import MedTokenBudget
from medtokenbudget.model.model import comparable
from medtokenbudget.progress import say

Part = Literal["auto", "val", "select", "train", "all"]


@dataclass(frozen=True)
class HeldOut:
    """Images with their tokens.

    Attributes:
        manifest: The images that were asked for.
        store: Their tokens, opened with this manifest.
        rows: Rows of the images as they are; an image that could not be read has none.
        off_center: Rows of their off-center crops, where the store has them.
        part: The part of the manifest that they are.
    """

    manifest: Manifest
    store: FeatureStore
    rows: np.ndarray
    off_center: np.ndarray
    part: str

    @property
    def ids(self) -> list[str]:
        """The image of each row."""
        return [self.store.ids[row] for row in self.rows]

    @property
    def groups(self) -> list[str]:
        """The group of each row; an image without one is a group of its own."""
        known = dict(zip(self.manifest.ids, self.manifest.groups))
        return [known[name] for name in self.ids]


def held_out(
    model: MedTokenBudget,
    manifest: Manifest | Path | str,
    store: FeatureStore | Path | str | None,
    tokens: Path,
    part: Part = "auto",
    run: Path | None = None,
    identity: str | None = None,
) -> HeldOut:
    """Open the images of a manifest for a model.

    Args:
        model: The model.
        manifest: The images.
        store: Their tokens; None extracts them with the model's backbone into `tokens`.
        tokens: Folder of the store that is filled then.
        part: Which images. 'auto' takes the validation images of the manifest that the model was trained with, and all images of
            any other manifest.
        run: The run directory that the model is in, if it is in one; its training images are refused.
        identity: Hash of the manifest as it was written, if `manifest` has other labels than that.

    Raises:
        RequestError: The images cannot be used, or the model was trained on some of them.
        MismatchError: The store is of another backbone.
    """
    opened = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    chosen = _chosen_part(model, identity or opened.hash, part)
    wanted = opened if chosen == "all" else opened.part(chosen)
    if not len(wanted):
        raise RequestError(f"The manifest has no images in the part '{chosen}'. Choose another one with --part, or --part all.")
    if store is None:
        found = extract(wanted, tokens, model.backbone_config, ExtractConfig(device=str(model.device)))
        _check_backbone(model, found)
    else:
        found = store if isinstance(store, FeatureStore) else FeatureStore.open(store)
        _check_backbone(model, found)
        found = found.annotated(wanted)
    rows = found.rows(wanted.ids, strict=False)
    if not len(rows):
        found.rows(wanted.ids)  # says which images are missing, and why
    if left_out := {error.image_id: error.reason for error in found.errors if error.view == IDENTITY}:
        reason = next(iter(left_out.values()))
        say(f"{len(left_out):,} of {len(wanted):,} images are left out, they or their masks cannot be used. The first: {reason}")
    _check_unseen(found, {found.ids[row] for row in rows}, run)
    return HeldOut(wanted, found, rows, found.rows(wanted.ids, view=OFF_CENTER, strict=False), chosen)


def run_of(folder: Path) -> Path | None:
    """The run directory of a model folder, if it is in one."""
    return folder.parent if folder.name == "model" and (folder.parent / FILE).is_file() else None


def _chosen_part(model: MedTokenBudget, manifest: str, part: Part) -> str:
    if part != "auto":
        return part
    trained_with = model.info.get("run", {}).get("hashes", {}).get("manifest")
    return "val" if trained_with == manifest else "all"


def _check_backbone(model: MedTokenBudget, store: FeatureStore) -> None:
    expected, found = comparable(model.backbone_fingerprint), comparable(store.config["backbone"])
    if expected != found:
        raise MismatchError.between(
            f"The store {store.path}",
            expected,
            found,
            "The model reads tokens of its own backbone and grid: leave out --store to extract them, or pass a store of it.",
        )
    if store.config["keep"] != "patches":
        raise RequestError(f"Store {store.path} contains only routed tokens, but the model reads all patches. Leave out --store.")


def _check_unseen(store: FeatureStore, names: set[str], run: Path | None) -> None:
    """Reject images that the model was trained on, recognized by their content; a run that is out of reach cannot be asked."""
    trained = None if run is None else _trained_on(run)
    if not trained or store.annotation is None:
        return
    seen = sorted(name for name in names if store.annotation.images.get(name) in trained)
    if seen:
        raise RequestError(
            f"The model was trained on {len(seen)} of the {len(names)} images: {listed(seen)}. Results on them would say nothing "
            "about new images. Use other images, or --part val."
        )


def _trained_on(run: Path) -> set[str]:
    """SHA-256 of the image files that the model of a run was trained on; empty if manifest or store are out of reach."""
    info = RunInfo.read(run)
    try:
        manifest = Manifest.read(info.manifest_path)
    except RequestError:
        return set()
    if not info.store_path.is_dir():
        return set()
    cached = [one["images"] for one in known_manifests(info.store_path)[0] if one["hash"] == info.hashes.get("manifest")]
    # From the files themselves where they are here: a cache that is damaged or gone must not open the door to training images.
    images = dict(zip(manifest.ids, hashes_of(info.store_path, manifest, cached[0] if cached else None)[0]))
    ids = [name for part in ("train", "select") for name in manifest.part(part).ids]
    return {image for name in ids if (image := images[name]) is not None}
