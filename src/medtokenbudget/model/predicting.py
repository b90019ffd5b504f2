"""Routings and predictions of a stream of images, batch by batch. Its own file because it is a loop over files, not part of the
network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from medtokenbudget.config import Count, Parallel, Settings
from medtokenbudget.errors import MedTokenBudgetError, RequestError
from medtokenbudget.model import parts
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.model.prediction import Prediction, Routing
from medtokenbudget.model.sources import Failure, Prepared, Source, prepared
from medtokenbudget.tokens import Selection, TokenBatch

if TYPE_CHECKING:
    from medtokenbudget.model.routed import MedTokenBudget

Item = tuple[Source, "Prepared | MedTokenBudgetError"]
Answer = TypeVar("Answer", bound=Routing)
Batch = list[tuple[Source, Prepared]]


@dataclass(frozen=True)
class Streaming(Settings):
    """How a stream of images is worked through.

    Attributes:
        batch_size: Images per forward pass.
        workers: Threads that decode images.
        masks: Whether to read the masks of the sources, for `Routing.lesion`.
    """

    batch_size: Count = 16
    workers: Parallel = 2
    masks: bool = False


def route_sources(
    model: MedTokenBudget, sources: Iterable[Source], budget: float | Guarantee, method: str, streaming: Streaming
) -> Iterator[tuple[Source, Routing | Failure]]:
    """Yield each source with its routing, or with the reason why it could not be read, in order and in constant memory."""
    return _stream(model, sources, _Routes(model, budget, method).of, streaming)


def predict_sources(
    model: MedTokenBudget, sources: Iterable[Source], budget: float | Guarantee, method: str, streaming: Streaming
) -> Iterator[tuple[Source, Prediction | Failure]]:
    """Yield each source with its prediction, or with the reason why it could not be read, in order and in constant memory."""
    return _stream(model, sources, _Predictions(model, budget, method).of, streaming)


def _stream(
    model: MedTokenBudget, sources: Iterable[Source], answer: Callable[[Batch], list[Answer]], streaming: Streaming
) -> Iterator[tuple[Source, Answer | Failure]]:
    return _batches(model, sources, answer, streaming)


def _batches(
    model: MedTokenBudget, sources: Iterable[Source], answer: Callable[[Batch], list[Answer]], streaming: Streaming
) -> Iterator[tuple[Source, Answer | Failure]]:
    size, grid = streaming.batch_size, model.grid if streaming.masks else None
    waiting: list[Item] = []
    good = 0
    for item in prepared(sources, model.backbone.prepare, streaming.workers, ahead=2 * size, grid=grid):
        waiting.append(item)
        good += isinstance(item[1], Prepared)
        if good == size or len(waiting) >= 4 * size:
            yield from _answers(waiting, answer)
            waiting, good = [], 0
    yield from _answers(waiting, answer)


def _answers(items: list[Item], answer: Callable[[Batch], list[Answer]]) -> Iterator[tuple[Source, Answer | Failure]]:
    good = [(source, value) for source, value in items if isinstance(value, Prepared)]
    answers = iter(answer(good)) if good else iter(())
    for source, value in items:
        if isinstance(value, Prepared):
            yield source, next(answers)
            if value.fault is not None:
                yield source, Failure(source.name, value.fault, routed=True)
        else:
            yield source, Failure(source.name, str(value))


class _Routes:
    """Routings of batches of images. The request is checked when this object is made."""

    def __init__(self, model: MedTokenBudget, budget: float | Guarantee, method: str) -> None:
        self.model, self.budget, self.method = model, budget, method
        self.classifier = model.classifier(method)
        if not isinstance(budget, Guarantee):
            model.k(budget, method)
        elif budget.selector != method:
            raise RequestError(f"This guarantee is for '{budget.selector}', not for '{method}'. Calibrate '{method}' first.")

    @torch.inference_mode()
    def of(self, items: Batch) -> list[Routing]:
        return [Routing(**fields) for fields in self.fields(items)[0]]

    def fields(self, items: Batch) -> tuple[list[dict[str, Any]], TokenBatch, list[Selection]]:
        """The fields of each image's `Routing`, and what they came from: one selection of all images, or one of each."""
        tokens = self.model.encode(np.stack([value.pixels for _, value in items]))
        with parts.evaluating(self.classifier):
            scores: Tensor | None
            if isinstance(self.budget, Guarantee):
                selections, scores = parts.select_above(self.classifier.selector, tokens, self.budget)
            else:
                selection, scores = parts.select(self.classifier.selector, tokens, self.model.k(self.budget, self.method))
                selections = [selection]
        score_rows = None if scores is None else scores.float().cpu().numpy()
        kept = [row for one in selections for row in (one.indices.cpu().numpy() if one.indices is not None else [None] * len(one))]
        gathered = [row for one in selections for row in one.tokens.float().cpu().numpy()]
        assignment = [row for one in selections for row in one.assignment.cpu().numpy()]
        unfamiliarity = None if self.model.familiarity is None else self.model.familiarity(tokens).cpu().tolist()
        rows = [
            {
                "image": source.name,
                "scores": None if score_rows is None else score_rows[row],
                "kept": kept[row],
                "tokens": gathered[row],
                "assignment": assignment[row],
                "budget": len(gathered[row]) / tokens.n if isinstance(self.budget, Guarantee) else self.budget,
                "k": len(gathered[row]),
                "grid": tokens.grid,
                "selector": self.method,
                "unfamiliarity": None if unfamiliarity is None else unfamiliarity[row],
                "lesion": value.lesion,
                "guarantee": self.budget if isinstance(self.budget, Guarantee) else None,
                "source": source,
            }
            for row, (source, value) in enumerate(items)
        ]
        return rows, tokens, selections


class _Predictions(_Routes):
    """Routings with the classes that the head reads from them."""

    def __init__(self, model: MedTokenBudget, budget: float | Guarantee, method: str) -> None:
        super().__init__(model, budget, method)
        self.head = self.classifier.required_head

    @torch.inference_mode()
    def of(self, items: Batch) -> list[Prediction]:  # type: ignore[override]
        rows, tokens, selections = self.fields(items)
        with parts.evaluating(self.classifier):
            read = [self.head.read(selection, tokens.grid) for selection in selections]
        found = torch.cat(read).softmax(-1).cpu().numpy()
        classes = self.model.classes
        return [
            Prediction(
                **fields,
                probabilities={name: float(p) for name, p in zip(classes, probabilities)},
                label=classes[int(probabilities.argmax())],
            )
            for fields, probabilities in zip(rows, found)
        ]
