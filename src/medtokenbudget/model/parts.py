"""Routed classifiers to and from plain descriptions and named tensors, and the two ways a model asks them.

Its own file because saving must know every option of every selector, and nothing else in the model does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medtokenbudget.errors import RequestError
from medtokenbudget.model.folder import HEADS, TENSORS
from medtokenbudget.routing import LATSSelector, Ranker, Selector, create, gather, rank
from medtokenbudget.tokens import Selection, TokenBatch
from medtokenbudget.training.head import RoutedClassifier, RoutingHead

MAIN = "lats"
SEED = 0
"""Of selectors that draw. Each image starts from it, so that an answer does not depend on what else is in the batch."""


def describe(classifier: RoutedClassifier) -> dict[str, Any]:
    """All that is needed to build the classifier again without its numbers, as JSON values."""
    head = classifier.head
    shape = {"hidden": [head.first.out_features, head.second.out_features], "dropout": head.dropout}
    return {"selector": classifier.selector.name, "options": _options(classifier.selector), "head": shape}


def _options(selector: Selector) -> dict[str, Any]:
    if isinstance(selector, LATSSelector):
        scorer = selector.scorer
        built = {"hidden": scorer.output.in_features, "layers": len(scorer.norms), "dropout": scorer.dropout}
        router = {"smooth": selector.smooth, "padding": selector.padding, "temperature": selector.temperature}
        signals = {"signals": list(scorer.signals), "neighborhood": scorer.neighborhood}
        return {**built, **signals, **router, "minimum": selector.minimum}
    names = [name for name in inspect.signature(type(selector)).parameters if name != "dim"]
    lost = [name for name in names if not hasattr(selector, name)]
    if lost:
        raise RequestError(
            f"selector '{selector.name}' must keep its options as attributes to be saved; {', '.join(lost)} are not."
        )
    return {name: getattr(selector, name) for name in names}


def tensors(classifiers: dict[str, RoutedClassifier]) -> dict[str, dict[str, Tensor]]:
    """Tensors of each file: `scorer.*` and `head.*` of the main classifier, `<method>/...` of the others."""
    files: dict[str, dict[str, Tensor]] = {TENSORS: _named(classifiers[MAIN])}
    for method, classifier in classifiers.items():
        if method != MAIN:
            files.setdefault(HEADS, {}).update({f"{method}/{name}": value for name, value in _named(classifier).items()})
    return files


def _named(classifier: RoutedClassifier) -> dict[str, Tensor]:
    return {name.removeprefix("selector."): value.detach().cpu() for name, value in classifier.state_dict().items()}


def build(identity: dict[str, Any], files: dict[str, dict[str, Tensor]], source: Path) -> dict[str, RoutedClassifier]:
    """The classifiers that `identity` describes with the tensors of `files`; every tensor must fit and be used."""
    dim, classes = identity["backbone"]["dim"], len(identity["classes"])
    built: dict[str, RoutedClassifier] = {}
    left = {(file, name) for file, values in files.items() for name in values}
    for method, described in identity["selectors"].items():
        file, prefix = (TENSORS, "") if method == MAIN else (HEADS, f"{method}/")
        classifier = _bare(described, dim, classes, source)
        found = {name[len(prefix) :]: value for name, value in files.get(file, {}).items() if name.startswith(prefix)}
        left -= {(file, prefix + name) for name in found}
        _fill(classifier, found, source / file, method)
        built[method] = classifier
    if left:
        raise RequestError(f"{source} holds tensors that no classifier uses: {', '.join(sorted(name for _, name in left)[:6])}.")
    return built


def _bare(described: dict[str, Any], dim: int, classes: int, source: Path) -> RoutedClassifier:
    try:
        name, options, head = described["selector"], described["options"], described["head"]
        learned = {"dim": dim} if _learns(name) else {}
        selector = create(name, **learned, **options)
        return RoutedClassifier(selector, RoutingHead(dim, classes, hidden=head["hidden"], dropout=head["dropout"]))
    except (KeyError, TypeError) as error:
        raise RequestError(f"{source}/config.json does not describe its selectors: {error}.") from None


def _learns(name: str) -> bool:
    from medtokenbudget.routing import selector_class

    return selector_class(name).learns


def _fill(classifier: RoutedClassifier, found: dict[str, Tensor], path: Path, method: str) -> None:
    own = {name.removeprefix("selector."): (name, value) for name, value in classifier.state_dict().items()}
    faults = [f"{name} is missing" for name in own if name not in found]
    faults += [f"{name} is not part of this model" for name in found if name not in own]
    faults += [
        f"{name} has shape {list(found[name].shape)}, expected {list(value.shape)}"
        for name, (_, value) in own.items()
        if name in found and found[name].shape != value.shape
    ]
    faults += [f"{name} holds NaN or infinite values" for name, value in found.items() if not bool(torch.isfinite(value).all())]
    if faults:
        raise RequestError(f"{path} does not fit the classifier '{method}': {'; '.join(faults[:6])}.")
    classifier.load_state_dict({own[name][0]: value for name, value in found.items()}, strict=True)


def select(selector: Selector, tokens: TokenBatch, k: int) -> tuple[Selection, Tensor | None]:
    """The selection of k tokens, and the scores [B, N] that the patches were ranked by (None for mergers)."""
    if selector.stochastic and len(tokens) > 1:
        each = [select(selector, tokens.take([row]), k) for row in range(len(tokens))]
        return _joined([selection for selection, _ in each]), _cat([scores for _, scores in each])
    noise = torch.Generator().manual_seed(SEED) if selector.stochastic else None
    if isinstance(selector, Ranker):
        scores = selector.score(selector.check(tokens), noise)
        return gather(tokens.patches, rank(scores)[:, :k]), scores
    return selector.select(tokens, k, noise), None


def pooled(selector: Selector, tokens: TokenBatch, budgets: Sequence[float]) -> Tensor:
    """Pooled tokens [B, len(budgets), D]."""
    if selector.stochastic:
        rows = (tokens.take([row]) for row in range(len(tokens)))
        return torch.cat([selector.pooled(row, budgets, torch.Generator().manual_seed(SEED)) for row in rows])
    return selector.pooled(tokens, budgets)


def _joined(selections: list[Selection]) -> Selection:
    return Selection(
        tokens=torch.cat([s.tokens for s in selections]),
        weights=torch.cat([s.weights for s in selections]),
        assignment=torch.cat([s.assignment for s in selections]),
        kept=_cat([s.kept for s in selections]),
        indices=_cat([s.indices for s in selections]),
    )


def _cat(values: list[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return torch.cat(present) if len(present) == len(values) else None
