"""Routings and predictions of a stream of images, batch by batch. Its own file because it is a loop over files, not part of the
network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.features.views import Box
from medtokenbudget.model import parts
from medtokenbudget.model.prediction import Prediction, Routing
from medtokenbudget.model.sources import Failure, Source, prepared
from medtokenbudget.tokens import Selection, TokenBatch

if TYPE_CHECKING:
    from medtokenbudget.model.routed import MedTokenBudget

Seen = tuple[np.ndarray, Box | None]
"""Prepared pixels, and the part of the image that they show."""
Item = tuple[Source, "Seen | MedTokenBudgetError"]
Answer = TypeVar("Answer", bound=Routing)


def route_sources(
    model: MedTokenBudget, sources: Iterable[Source], budget: float, method: str, batch_size: int, workers: int
) -> Iterator[tuple[Source, Routing | Failure]]:
    """Yield each source with its routing, or with the reason why it could not be read, in order and in constant memory."""
    return _stream(model, sources, _Routes(model, budget, method).of, batch_size, workers)


def predict_sources(
    model: MedTokenBudget, sources: Iterable[Source], budget: float, method: str, batch_size: int, workers: int
) -> Iterator[tuple[Source, Prediction | Failure]]:
    """Yield each source with its prediction, or with the reason why it could not be read, in order and in constant memory."""
    return _stream(model, sources, _Predictions(model, budget, method).of, batch_size, workers)


def _stream(
    model: MedTokenBudget,
    sources: Iterable[Source],
    answer: Callable[[list[tuple[Source, Seen]]], list[Answer]],
    batch_size: int,
    workers: int,
) -> Iterator[tuple[Source, Answer | Failure]]:
    if batch_size < 1:
        raise RequestError(f"batch_size must be at least 1, got {batch_size}.")
    return _batches(model, sources, answer, batch_size, workers)


def _batches(
    model: MedTokenBudget,
    sources: Iterable[Source],
    answer: Callable[[list[tuple[Source, Seen]]], list[Answer]],
    batch_size: int,
    workers: int,
) -> Iterator[tuple[Source, Answer | Failure]]:
    waiting: list[Item] = []
    good = 0
    for item in prepared(sources, model.backbone.see, workers, ahead=2 * batch_size):
        waiting.append(item)
        good += isinstance(item[1], tuple)
        if good == batch_size or len(waiting) >= 4 * batch_size:
            yield from _answers(waiting, answer)
            waiting, good = [], 0
    yield from _answers(waiting, answer)


def _answers(
    items: list[Item], answer: Callable[[list[tuple[Source, Seen]]], list[Answer]]
) -> Iterator[tuple[Source, Answer | Failure]]:
    good = [(source, value) for source, value in items if isinstance(value, tuple)]
    answers = iter(answer(good)) if good else iter(())
    for source, value in items:
        if isinstance(value, tuple):
            yield source, next(answers)
        else:
            yield source, Failure(source.name, str(value))


class _Routes:
    """Routings of batches of images. The request is checked when this object is made."""

    def __init__(self, model: MedTokenBudget, budget: float, method: str) -> None:
        self.model, self.budget, self.method = model, budget, method
        self.classifier, self.k = model.classifier(method), model.k(budget, method)

    @torch.inference_mode()
    def of(self, items: list[tuple[Source, Seen]]) -> list[Routing]:
        return [Routing(**fields) for fields in self.fields(items)[0]]

    def fields(self, items: list[tuple[Source, Seen]]) -> tuple[list[dict[str, Any]], TokenBatch, Selection]:
        """The fields of each image's `Routing`, and what they came from."""
        tokens = self.model.encode(np.stack([pixels for _, (pixels, _) in items]))
        with parts.evaluating(self.classifier):
            selection, scores = parts.select(self.classifier.selector, tokens, self.k)
        kept = None if selection.indices is None else selection.indices.cpu().numpy()
        gathered, assignment = selection.tokens.float().cpu().numpy(), selection.assignment.cpu().numpy()
        score_rows = None if scores is None else scores.float().cpu().numpy()
        rows = [
            {
                "image": source.name,
                "scores": None if score_rows is None else score_rows[row],
                "kept": None if kept is None else kept[row],
                "tokens": gathered[row],
                "assignment": assignment[row],
                "budget": self.budget,
                "k": selection.k,
                "grid": tokens.grid,
                "selector": self.method,
                "box": box,
                "source": source,
            }
            for row, (source, (_, box)) in enumerate(items)
        ]
        return rows, tokens, selection


class _Predictions(_Routes):
    """Routings with the classes that the head reads from them."""

    def __init__(self, model: MedTokenBudget, budget: float, method: str) -> None:
        super().__init__(model, budget, method)
        self.head = self.classifier.required_head

    @torch.inference_mode()
    def of(self, items: list[tuple[Source, Seen]]) -> list[Prediction]:  # type: ignore[override]
        rows, tokens, selection = self.fields(items)
        with parts.evaluating(self.classifier):
            found = self.head.read(selection, tokens.grid).softmax(-1).cpu().numpy()
        classes = self.model.classes
        return [
            Prediction(
                **fields,
                probabilities={name: float(p) for name, p in zip(classes, probabilities)},
                label=classes[int(probabilities.argmax())],
            )
            for fields, probabilities in zip(rows, found)
        ]
