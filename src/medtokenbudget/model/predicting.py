"""Predictions of a stream of images, batch by batch. Its own file because it is a loop over files, not part of the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.model import parts
from medtokenbudget.model.prediction import Prediction
from medtokenbudget.model.sources import Failure, Source, prepared

if TYPE_CHECKING:
    from medtokenbudget.model.routed import MedTokenBudget

Item = tuple[Source, "np.ndarray | MedTokenBudgetError"]


def predict_sources(
    model: MedTokenBudget, sources: Iterable[Source], budget: float, method: str, batch_size: int, workers: int
) -> Iterator[tuple[Source, Prediction | Failure]]:
    """Yield each source with its prediction, or with the reason why it could not be read, in order and in constant memory."""
    model.k(budget, method)
    if batch_size < 1:
        raise RequestError(f"batch_size must be at least 1, got {batch_size}.")
    waiting: list[Item] = []
    good = 0
    for item in prepared(sources, model.backbone.prepare, workers, ahead=2 * batch_size):
        waiting.append(item)
        good += isinstance(item[1], np.ndarray)
        if good == batch_size or len(waiting) >= 4 * batch_size:
            yield from _answers(model, waiting, budget, method)
            waiting, good = [], 0
    yield from _answers(model, waiting, budget, method)


def _answers(model: MedTokenBudget, items: list[Item], budget: float, method: str) -> Iterator[tuple[Source, Prediction | Failure]]:
    good = [(source, value) for source, value in items if isinstance(value, np.ndarray)]
    answers = iter(_predict_batch(model, good, budget, method)) if good else iter(())
    for source, value in items:
        if isinstance(value, np.ndarray):
            yield source, next(answers)
        else:
            yield source, Failure(source.name, str(value))


@torch.inference_mode()
def _predict_batch(model: MedTokenBudget, items: list[tuple[Source, np.ndarray]], budget: float, method: str) -> list[Prediction]:
    classifier = model.classifier(method)
    tokens = model.encode(np.stack([value for _, value in items]))
    with parts.evaluating(classifier):
        selection, scores = parts.select(classifier.selector, tokens, model.k(budget, method))
        probabilities = classifier.head.read(selection, tokens.grid).softmax(-1).cpu().numpy()
    kept = None if selection.indices is None else selection.indices.cpu().numpy()
    gathered, assignment = selection.tokens.float().cpu().numpy(), selection.assignment.cpu().numpy()
    score_rows = None if scores is None else scores.float().cpu().numpy()
    return [
        Prediction(
            image=source.name,
            probabilities={name: float(p) for name, p in zip(model.classes, probabilities[row])},
            label=model.classes[int(probabilities[row].argmax())],
            scores=None if score_rows is None else score_rows[row],
            kept=None if kept is None else kept[row],
            tokens=gathered[row],
            assignment=assignment[row],
            budget=budget,
            k=selection.k,
            grid=tokens.grid,
            selector=method,
            source=source,
        )
        for row, (source, _) in enumerate(items)
    ]
