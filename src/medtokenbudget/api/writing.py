"""Answers of a model to files: a table, tokens, overlays and a list of what could not be read, in constant memory.

Its own file because `mtb predict` and `mtb route` write the same things.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from medtokenbudget.data import decode_mask
from medtokenbudget.errors import MedTokenBudgetError, WorkError
from medtokenbudget.files import append_line, remove, write_encoded
from medtokenbudget.locks import exclusive
from medtokenbudget.model import Failure, Guarantee, MedTokenBudget, Routing, Source, overlay
from medtokenbudget.model.table import Column, TokenFormat, check_table_path, table_writer, token_writer
from medtokenbudget.progress import progress

NOTICE = "Research software, not a medical device."


@dataclass(frozen=True)
class Outputs:
    """Where answers go.

    Attributes:
        table: Table to write, `.csv` or `.parquet`.
        errors: File that lists the images that could not be read.
        tokens: Safetensors file for the kept tokens, optional.
        tokens_dtype: Number format of these tokens.
        overlays: Folder for one overlay picture per image, optional.
    """

    table: Path
    errors: Path
    tokens: Path | None = None
    tokens_dtype: TokenFormat = "fp16"
    overlays: Path | None = None


@dataclass(frozen=True)
class Summary:
    """What was written.

    Attributes:
        done: Number of images in the table.
        failed: Number of images that could not be read.
        errors: File with the reasons; None if there were none.
        unfamiliar: Number of images that are unlike the training images of the model; None if it cannot tell.
        masks_failed: Number of masks that could not be used; their images are in the table all the same.
        mask_reason: Why the first of them could not; empty if all could.
    """

    done: int
    failed: int
    errors: Path | None
    unfamiliar: int | None = None
    masks_failed: int = 0
    mask_reason: str = ""


def metadata_of(model: MedTokenBudget, method: str, budget: float | Guarantee) -> dict[str, str]:
    """What a table and a token file say about where they come from."""
    return {
        "classes": json.dumps(list(model.classes)),
        "selector": method,
        **({"guarantee": json.dumps(budget.to_json())} if isinstance(budget, Guarantee) else {"budget": str(budget)}),
        "grid": json.dumps(list(model.grid)),
        "model": model.fingerprint,
        "notice": NOTICE,
    }


def write_answers(
    answers: Iterable[tuple[Source, Routing | Failure]],
    outputs: Outputs,
    columns: Sequence[Column],
    metadata: dict[str, str],
    what: str,
    each: Callable[[Routing], None] | None = None,
) -> Summary:
    """Write every answer as it comes, and list what could not be read.

    Args:
        answers: What `MedTokenBudget.predict_sources` or `route_sources` yields.
        outputs: Where to write.
        columns: Columns of the table.
        metadata: Metadata of the table and the tokens.
        what: Name of the work, for the progress bar.
        each: Called with every answer.

    Raises:
        WorkError: If no image could be read; no table is written then.
    """
    check_table_path(outputs.table)
    errors = outputs.errors
    with exclusive(outputs.table.parent, name=f".{outputs.table.stem}.lock"), progress(what=what, unit="image") as bar:
        remove(errors)
        counts = write_rows(
            answers,
            outputs,
            columns,
            metadata,
            note=lambda image, reason: append_line(errors, {"image": image, "reason": reason}),
            advance=bar.update,
            each=each,
        )
    return Summary(errors=errors if errors.exists() else None, **vars(counts))


@dataclass(frozen=True)
class Counts:
    """What `Summary` counts, of one table."""

    done: int
    failed: int
    unfamiliar: int | None
    masks_failed: int
    mask_reason: str


def write_rows(
    answers: Iterable[tuple[Source, Routing | Failure]],
    outputs: Outputs,
    columns: Sequence[Column],
    metadata: dict[str, str],
    note: Callable[[str, str], None],
    advance: Callable[[], Any] = lambda: None,
    each: Callable[[Routing], None] | None = None,
    first: int = 0,
    empty: bool = False,
) -> Counts:
    """Write every answer as it comes. The table appears last, so whoever sees it finds the rest too.

    Args:
        answers: Sources with their answers.
        outputs: Where to write; `errors` is only named in the message.
        columns: Columns of the table.
        metadata: Metadata of the table and the tokens.
        note: Called with the name and the reason for each image that could not be read, or whose mask could not.
        advance: Called for every image.
        each: Called with every answer.
        first: Number of the first overlay.
        empty: Whether a table without rows is written if no image could be read; otherwise that is an error.
    """
    done, failed, unfamiliar, knows, reason = 0, 0, 0, False, ""
    masks_failed, mask_reason = 0, ""
    with ExitStack() as stack:
        writers = [stack.enter_context(table_writer(outputs.table, columns, metadata))]
        packed = "guarantee" in metadata
        if outputs.tokens is not None:
            writers.append(stack.enter_context(token_writer(outputs.tokens, metadata, outputs.tokens_dtype, packed)))
        for source, answer in answers:
            if isinstance(answer, Failure):
                note(answer.name, f"Routed, but its mask cannot be used: {answer.reason}" if answer.routed else answer.reason)
                if answer.routed:
                    mask_reason = mask_reason or answer.reason
                    masks_failed += 1
                else:
                    advance()
                    reason = reason or answer.reason
                    failed += 1
                continue
            advance()
            if outputs.overlays is not None:
                _save_overlay(outputs.overlays / f"{first + done:06d}-{Path(answer.image).stem}.png", source, answer, note)
            for writer in writers:
                writer.add(answer)
            if each is not None:
                each(answer)
            knows |= answer.unfamiliarity is not None
            unfamiliar += answer.unfamiliar
            done += 1
        if done == 0 and not empty:
            raise none_readable(failed, reason, outputs.errors)
    return Counts(done, failed, unfamiliar if knows else None, masks_failed, mask_reason)


def none_readable(failed: int, reason: str, errors: Path) -> WorkError:
    """The error for a request without a single readable image."""
    return WorkError(f"No image could be read ({failed} failed). First error: {reason} All errors are in {errors}.")


def _save_overlay(path: Path, source: Source, answer: Routing, note: Callable[[str, str], None]) -> None:
    picture = overlay(source, answer, _mask(source, note))
    write_encoded(path, lambda stream: picture.save(stream, format="PNG"))


def _mask(source: Source, note: Callable[[str, str], None]) -> Image.Image | None:
    """The mask to outline; one that cannot be read is reported, and the overlay is drawn without it."""
    if source.mask is None:
        return None
    try:
        return decode_mask(source.mask)
    except MedTokenBudgetError as error:
        note(source.name, f"Drawn, but its mask could not be read: {error}")
        return None
