"""`predict_files`: predictions of many images to files (table, tokens, overlays, and a list of what could not be read).

Its own file because it combines the model with writing files, for the command line and for Python alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medtokenbudget.api.writing import Outputs, Summary, metadata_of, write_answers
from medtokenbudget.model import Guarantee, MedTokenBudget, expand, load
from medtokenbudget.model.table import TokenFormat, check_table_path, prediction_columns


def predict_files(
    model: MedTokenBudget | Path | str,
    images: Any,
    out: Path | str,
    budget: float | Guarantee | None = None,
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
        budget: Share of the patches that is kept, in (0, 1], or a guarantee of the model; None means 0.3, or the only budget of a
            model that is routed early.
        selector: Method to use; None means the model's main one.
        tokens: Safetensors file for the kept tokens, optional.
        tokens_dtype: Number format of these tokens.
        overlays: Folder for one overlay picture per image, optional.
        batch_size: Images per forward pass.
        workers: Threads that decode images.

    Returns:
        How many images were predicted. Images that could not be read are listed in `x.errors.jsonl` next to `x.csv`.

    Raises:
        NoHeadError: If the model is a router without a head.
        WorkError: If no image could be read; no table is written then.
    """
    out = Path(out)
    check_table_path(out)
    if not isinstance(model, MedTokenBudget):
        model = load(model)
    outputs = Outputs(
        table=out,
        errors=out.with_name(f"{out.stem}.errors.jsonl"),
        tokens=None if tokens is None else Path(tokens),
        tokens_dtype=tokens_dtype,
        overlays=None if overlays is None else Path(overlays),
    )
    method = model.main if selector is None else selector
    budget = model.amount(budget)
    answers = model.predict_sources(expand(images), budget, method, batch_size, workers)
    return write_answers(answers, outputs, prediction_columns(model.classes), metadata_of(model, method, budget), "Predicting")
