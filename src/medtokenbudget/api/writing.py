"""Answers of a model to files: a table, tokens, overlays and a list of what could not be read, in constant memory.

Its own file because `mtb predict` and `mtb route` write the same things.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

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
    """

    done: int
    failed: int
    errors: Path | None
    unfamiliar: int | None = None


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
    """Write every answer as it comes.

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
    done, failed, unfamiliar, first = 0, 0, 0, ""
    knows = False
    with ExitStack() as stack:
        stack.enter_context(exclusive(outputs.table.parent, name=f".{outputs.table.stem}.lock"))
        remove(outputs.errors)
        writers = [stack.enter_context(table_writer(outputs.table, columns, metadata))]
        packed = "guarantee" in metadata
        if outputs.tokens is not None:
            writers.append(stack.enter_context(token_writer(outputs.tokens, metadata, outputs.tokens_dtype, packed)))
        bar = stack.enter_context(progress(what=what, unit="image"))
        for source, answer in answers:
            if isinstance(answer, Failure):
                append_line(outputs.errors, {"image": answer.name, "reason": answer.reason})
                if not answer.routed:
                    bar.update()
                    first = first or answer.reason
                    failed += 1
                continue
            bar.update()
            if outputs.overlays is not None:
                _save_overlay(outputs.overlays / f"{done:06d}-{Path(answer.image).stem}.png", source, answer, outputs.errors)
            for writer in writers:
                writer.add(answer)
            if each is not None:
                each(answer)
            knows |= answer.unfamiliarity is not None
            unfamiliar += answer.unfamiliar
            done += 1
        if done == 0:
            raise WorkError(f"No image could be read ({failed} failed). First error: {first} All errors are in {outputs.errors}.")
    return Summary(done, failed, outputs.errors if outputs.errors.exists() else None, unfamiliar if knows else None)


def _save_overlay(path: Path, source: Source, answer: Routing, errors: Path) -> None:
    picture = overlay(source, answer, _mask(source, errors))
    write_encoded(path, lambda stream: picture.save(stream, format="PNG"))


def _mask(source: Source, errors: Path) -> Image.Image | None:
    """The mask to outline; one that cannot be read is reported, and the overlay is drawn without it."""
    if source.mask is None:
        return None
    try:
        return decode_mask(source.mask)
    except MedTokenBudgetError as error:
        append_line(errors, {"image": source.name, "reason": f"Drawn, but its mask could not be read: {error}"})
        return None
