"""`calibrate`: add a guarantee to a saved model, so that it keeps a promised share of the lesion instead of a budget."""

from __future__ import annotations

import tempfile
from pathlib import Path

from medtokenbudget.backbone import FeatureStore
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.files import write_sealed
from medtokenbudget.locks import exclusive
from medtokenbudget.model import Guarantee, MedTokenBudget, load
from medtokenbudget.model.folder import CONFIG, read_config
from medtokenbudget.model.guarantee import with_guarantee
from medtokenbudget.model.hub import resolve
from medtokenbudget.routing.conformal import Promise
from medtokenbudget.runs.evaluate import Part, calibrated, held_out, run_of


def calibrate(
    model: MedTokenBudget | Path | str,
    manifest: Manifest | Path | str,
    retention: float,
    coverage: float | None = None,
    cap: float | None = None,
    store: FeatureStore | Path | str | None = None,
    selector: str | None = None,
    part: Part = "auto",
    out: Path | str | None = None,
) -> Guarantee:
    """Calibrate a model on images with masks, so that it keeps a promised share of the lesion.

    Args:
        model: A run directory, a model folder, a hub id, or a model. The guarantee is saved in the folder (a model that was passed
            as an object is only changed in memory).
        manifest: Images with masks that the model was not trained on. Their groups are the exchangeable units.
        retention: Promised share of the lesion patches, such as 0.95.
        coverage: None promises it on average. With 0.9, nine of ten images keep at least `retention` of their lesion.
        cap: Largest share of the patches that an image may keep. The promise holds with it, or is refused.
        store: Tokens of the images; None extracts them.
        selector: Method to calibrate; None means the main one.
        part: Which images of the manifest; 'auto' takes the validation images of the model's own manifest, all of another one.
        out: Folder for a calibrated copy; None saves the guarantee in the model folder itself.

    Returns:
        The guarantee. `model.guarantee(retention)` finds it again.

    Raises:
        RequestError: The images cannot be used, or do not allow this promise.

    Example:
        >>> guarantee = mtb.calibrate("runs/first", "photos.parquet", retention=0.8, store="tokens")
        >>> mtb.load("runs/first").predict("photo.jpg", budget=guarantee)[0].guarantee.retention
        0.8
    """
    promise = Promise(retention, coverage)
    folder = None if isinstance(model, MedTokenBudget) else resolve(model)
    if folder is not None and out is None and not Path(str(model)).expanduser().is_dir():
        raise RequestError(
            f"{model} is not a folder of yours, so nothing can be saved in it. Pass --out DIR for a calibrated copy."
        )
    loaded = model if isinstance(model, MedTokenBudget) else load(model)
    with tempfile.TemporaryDirectory(prefix="mtb-calibrate-") as scratch:
        run = None if folder is None else run_of(folder)
        images = held_out(loaded, manifest, store, Path(scratch) / "tokens", part, run)
        found = calibrated(loaded, images, promise, selector, cap)
    loaded.guarantees = with_guarantee(loaded.guarantees, found)
    if out is not None:
        loaded.save_pretrained(out)
    elif folder is not None:
        _store(folder, found, loaded)
    return found


def _store(folder: Path, found: Guarantee, model: MedTokenBudget) -> None:
    """Write the guarantees into `config.json`; the tensors stay as they are."""
    with exclusive(folder):
        config = read_config(folder)
        write_sealed(folder / CONFIG, {**config, "guarantees": [guarantee.to_json() for guarantee in model.guarantees]})
