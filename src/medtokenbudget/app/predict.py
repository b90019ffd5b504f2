"""Predictions of many images to files: the table, the tokens, the pictures and the list of what could not be read.

Its own file because it joins the model (left) with the drawing of overlays (report), for the command and for Python alike.
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
from medtokenbudget.files import append_line, atomic_write
from medtokenbudget.model import Failure, MedTokenBudget, Prediction, Source, expand
from medtokenbudget.model.table import TokenFormat, check_table_path, table_writer, token_writer
from medtokenbudget.progress import progress
from medtokenbudget.report.overlay import overlay


@dataclass(frozen=True)
class Summary:
    """How many images were predicted, how many could not be read, and where the reasons stand (None when all went well)."""

    done: int
    failed: int
    errors: Path | None


def predict_files(
    model: MedTokenBudget,
    images: Any,
    out: Path,
    budget: float = 0.3,
    selector: str = "lats",
    tokens: Path | None = None,
    tokens_dtype: TokenFormat = "fp16",
    overlays: Path | None = None,
    batch_size: int = 16,
    workers: int = 2,
) -> Summary:
    """Predict `images` (as `MedTokenBudget.predict` takes them, or a manifest) into the table `out`, in constant memory.

    An image that cannot be read is a line in `x.errors.jsonl` beside `x.csv`; the others go on. If none can be read, nothing is
    written and the work has failed.
    """
    check_table_path(out)
    errors = out.with_name(f"{out.stem}.errors.jsonl")
    errors.unlink(missing_ok=True)
    metadata = {
        "classes": json.dumps(list(model.classes)),
        "selector": selector,
        "budget": str(budget),
        "grid": json.dumps(list(model.backbone.grid)),
        "model": model.fingerprint,
        "notice": "Research software, not a medical device.",
    }
    done, failed, first = 0, 0, ""
    with ExitStack() as stack:
        writers = [stack.enter_context(table_writer(out, model.classes, metadata))]
        if tokens is not None:
            writers.append(stack.enter_context(token_writer(tokens, metadata, tokens_dtype)))
        bar = stack.enter_context(progress(what="predict", unit="image"))
        for source, answer in model.predict_sources(expand(images), budget, selector, batch_size, workers):
            bar.update()
            if isinstance(answer, Failure):
                append_line(errors, {"image": answer.name, "reason": answer.reason})
                first = first or answer.reason
                failed += 1
                continue
            if overlays is not None:
                _save_overlay(overlays / f"{done:06d}-{Path(answer.image).stem}.png", source, answer, errors)
            for writer in writers:
                writer.add(answer)
            done += 1
        if done == 0:
            raise WorkError(f"none of {failed} images could be read, for example: {first} All reasons are in {errors}.")
    return Summary(done, failed, errors if errors.exists() else None)


def _save_overlay(path: Path, source: Source, prediction: Prediction, errors: Path) -> None:
    picture = overlay(source.open(), prediction, _mask(source, errors))
    with atomic_write(path) as temporary:
        picture.save(temporary, format="PNG")


def _mask(source: Source, errors: Path) -> Image.Image | None:
    """The mask to outline; one that cannot be read is written down, and the picture goes without it."""
    if source.mask is None:
        return None
    try:
        return decode_mask(source.mask)
    except MedTokenBudgetError as error:
        append_line(errors, {"image": source.name, "reason": f"predicted, but its mask was not drawn: {error}"})
        return None
