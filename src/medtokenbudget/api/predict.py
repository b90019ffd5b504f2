"""`predict_files`: predictions of many images to files (table, tokens, overlays, and a list of what could not be read).

Its own file because it combines the model with writing files, for the command line and for Python alike.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from medtokenbudget.data import decode_mask
from medtokenbudget.errors import MedTokenBudgetError, WorkError
from medtokenbudget.files import append_line, remove, write_encoded
from medtokenbudget.locks import exclusive
from medtokenbudget.model import Failure, MedTokenBudget, Prediction, Source, expand, load, overlay
from medtokenbudget.model.table import TokenFormat, check_table_path, table_writer, token_writer
from medtokenbudget.progress import progress


@dataclass(frozen=True)
class Summary:
    """Result of `predict_files`.

    Attributes:
        done: Number of images predicted.
        failed: Number of images that could not be read.
        errors: File with the reasons; None if there were none.
    """

    done: int
    failed: int
    errors: Path | None


def predict_files(
    model: MedTokenBudget | Path | str,
    images: Any,
    out: Path | str,
    budget: float = 0.3,
    selector: str | None = None,
    tokens: Path | str | None = None,
    tokens_dtype: TokenFormat = "fp16",
    overlays: Path | str | None = None,
    batch_size: int = 16,
    workers: int = 2,
) -> Summary:
    """Predict images and write the results to files, in constant memory.

    Args:
        model: A model, or what `mtb.load` takes.
        images: What `MedTokenBudget.predict` takes.
        out: Table to write, `.csv` or `.parquet`.
        budget: Share of the patches that is kept, in (0, 1].
        selector: Method to use; None means the model's main one.
        tokens: Safetensors file for the kept tokens, optional.
        tokens_dtype: Number format of these tokens.
        overlays: Folder for one overlay picture per image, optional.
        batch_size: Images per forward pass.
        workers: Threads that decode images.

    Returns:
        How many images were predicted. Images that could not be read are listed in `x.errors.jsonl` next to `x.csv`.

    Raises:
        WorkError: If no image could be read; no table is written then.
    """
    if not isinstance(model, MedTokenBudget):
        model = load(model)
    out = Path(out)
    check_table_path(out)
    errors = out.with_name(f"{out.stem}.errors.jsonl")
    method = model.main if selector is None else selector
    metadata = {
        "classes": json.dumps(list(model.classes)),
        "selector": method,
        "budget": str(budget),
        "grid": json.dumps(list(model.grid)),
        "model": model.fingerprint,
        "notice": "Research software, not a medical device.",
    }
    done, failed, first = 0, 0, ""
    with ExitStack() as stack:
        stack.enter_context(exclusive(out.parent, name=f".{out.stem}.lock"))
        remove(errors)
        writers = [stack.enter_context(table_writer(out, model.classes, metadata))]
        if tokens is not None:
            writers.append(stack.enter_context(token_writer(Path(tokens), metadata, tokens_dtype)))
        bar = stack.enter_context(progress(what="Predicting", unit="image"))
        for source, answer in model.predict_sources(expand(images), budget, method, batch_size, workers):
            bar.update()
            if isinstance(answer, Failure):
                append_line(errors, {"image": answer.name, "reason": answer.reason})
                first = first or answer.reason
                failed += 1
                continue
            if overlays is not None:
                _save_overlay(Path(overlays) / f"{done:06d}-{Path(answer.image).stem}.png", source, answer, errors)
            for writer in writers:
                writer.add(answer)
            done += 1
        if done == 0:
            raise WorkError(f"No image could be read ({failed} failed). First error: {first} All errors are in {errors}.")
    return Summary(done, failed, errors if errors.exists() else None)


def _save_overlay(path: Path, source: Source, prediction: Prediction, errors: Path) -> None:
    picture = overlay(source, prediction, _mask(source, errors))
    write_encoded(path, lambda stream: picture.save(stream, format="PNG"))


def _mask(source: Source, errors: Path) -> Image.Image | None:
    """The mask to outline; one that cannot be read is reported, and the overlay is drawn without it."""
    if source.mask is None:
        return None
    try:
        return decode_mask(source.mask)
    except MedTokenBudgetError as error:
        append_line(errors, {"image": source.name, "reason": f"Predicted, but its mask could not be read: {error}"})
        return None
