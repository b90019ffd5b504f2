"""`evaluate`: a saved model on images that it was not trained on, as a run with a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from medtokenbudget.api.run import Run
from medtokenbudget.backbone import FeatureStore
from medtokenbudget.config import HEADLINE_BUDGETS
from medtokenbudget.data import Manifest
from medtokenbudget.errors import RequestError
from medtokenbudget.locks import exclusive
from medtokenbudget.model import MedTokenBudget, load
from medtokenbudget.model.hub import resolve
from medtokenbudget.runs.evaluate import (
    Evaluation,
    Part,
    held_out,
    in_classes_of,
    own_validation,
    read_mapping,
    run_evaluation,
    run_of,
)
from medtokenbudget.runs.run import FILE, RunInfo


def evaluate(
    model: MedTokenBudget | Path | str,
    manifest: Manifest | Path | str,
    out: Path | str,
    store: FeatureStore | Path | str | None = None,
    budgets: Sequence[float] = HEADLINE_BUDGETS,
    selector: str | None = None,
    classes: Mapping[str, str | None] | Path | str | None = None,
    part: Part = "auto",
) -> Run:
    """Evaluate a saved model on a manifest, beside the controls `center`, `darkness`, `random` and `oracle`.

    Args:
        model: A run directory, a model folder, a hub id, 'dermoscopy', or a model.
        manifest: The images, with masks, labels, both or neither.
        out: The run directory to write.
        store: Tokens of the images; None extracts them into `out/tokens`.
        budgets: Shares of the patches to keep.
        selector: Method of the model; None means its main one.
        classes: Where class names differ: class of the data to class of the model (None leaves it out), or a JSON file of that.
        part: Which images; 'auto' takes the validation images of the model's own manifest, all images of another one.

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
    target = Path(out)
    if (target / FILE).exists() and RunInfo.read(target).evaluation is None:
        raise RequestError(f"{target} is the run of a training. Pass another --out for the evaluation.")
    folder = None if isinstance(model, MedTokenBudget) else resolve(model)
    loaded = model if isinstance(model, MedTokenBudget) else load(model)
    original = manifest if isinstance(manifest, Manifest) else Manifest.read(manifest)
    mapping = read_mapping(classes) if isinstance(classes, (str, Path)) else classes
    labeled = in_classes_of(original, loaded.classes, mapping)
    run = None if folder is None else run_of(folder)
    method = loaded.main if selector is None else selector
    loaded.classifier(method)
    with exclusive(target):
        images = held_out(loaded, labeled, store, target / "tokens", part, run, original.hash)
        path = target / "manifest.parquet" if isinstance(manifest, Manifest) else Path(manifest).resolve()
        if isinstance(manifest, Manifest):
            original.write(path)
        evaluation = Evaluation(
            model=loaded,
            source=str(folder or "a model in memory"),
            images=images,
            original=original,
            manifest=path,
            budgets=tuple(budgets),
            selector=selector,
            own=own_validation(run, method, budgets),
            mapping=mapping,
        )
        run_evaluation(evaluation, target)
    return Run(target)
