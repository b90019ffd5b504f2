"""Routed classifiers to and from plain descriptions and named tensors, and the two ways a model runs them.

Its own file because saving has to know how every selector and head is built, and nothing else in the model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medtokenbudget.errors import RequestError
from medtokenbudget.heads import create_head
from medtokenbudget.model.folder import CONFIG, HEADS, TENSORS
from medtokenbudget.model.guarantee import Guarantee
from medtokenbudget.routing import Ranker, Selector, create_selector, gather, rank, selector_class
from medtokenbudget.tokens import Selection, TokenBatch
from medtokenbudget.training.classifier import RoutedClassifier
from medtokenbudget.training.familiarity import Familiarity

FAMILIARITY = "familiarity."
SEED = 0
"""Seed of stochastic selectors. Each image starts from it, so that a prediction does not depend on the rest of its batch."""


def describe(classifier: RoutedClassifier) -> dict[str, Any]:
    """What is needed to build the classifier again, apart from its tensors, as JSON values."""
    selector, head = classifier.selector, classifier.head
    described = None if head is None else {"name": head.name, "options": head.options()}
    return {"selector": selector.name, "options": selector.options(), "head": described}


def tensors(
    classifiers: Mapping[str, RoutedClassifier], main: str, familiarity: Familiarity | None = None
) -> dict[str, dict[str, Tensor]]:
    """Tensors of each file: `selector.*` and `head.*` of the main method, the others with `<method>/` before their names.

    What tells unfamiliar images is in the main file as `familiarity.*`.
    """
    files: dict[str, dict[str, Tensor]] = {TENSORS: _cpu_state(classifiers[main])}
    if familiarity is not None:
        files[TENSORS] |= {f"{FAMILIARITY}{name}": value for name, value in _cpu_state(familiarity).items()}
    for method, classifier in classifiers.items():
        # A router without parameters and head, such as the control `center`, has no tensors.
        if method != main and (state := _cpu_state(classifier)):
            files.setdefault(HEADS, {}).update({f"{method}/{name}": value for name, value in state.items()})
    return files


def _cpu_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def take_familiarity(identity: dict[str, Any], files: dict[str, dict[str, Tensor]], source: Path) -> Familiarity | None:
    """Build what tells unfamiliar images and remove its tensors from `files`; None if the model was saved without it."""
    found = {name: files[TENSORS].pop(name) for name in list(files[TENSORS]) if name.startswith(FAMILIARITY)}
    basis = found.get(f"{FAMILIARITY}image.basis")
    if basis is None and not found:
        return None
    rank = basis.shape[1] if basis is not None and basis.ndim == 2 else 1
    built = Familiarity(identity["backbone"]["dim"], rank)
    _fill(built, {name.removeprefix(FAMILIARITY): value for name, value in found.items()}, source / TENSORS, FAMILIARITY[:-1])
    return built


def build(identity: dict[str, Any], files: dict[str, dict[str, Tensor]], source: Path) -> dict[str, RoutedClassifier]:
    """Build the classifiers that `identity` describes from the tensors in `files`; every tensor must fit and be used."""
    dim, classes = identity["backbone"]["dim"], len(identity["classes"])
    built: dict[str, RoutedClassifier] = {}
    unused = {(file, name) for file, values in files.items() for name in values}
    for method, described in identity["selectors"].items():
        file, prefix = (TENSORS, "") if method == identity["main"] else (HEADS, f"{method}/")
        classifier = _empty(described, dim, classes, source)
        found = {name[len(prefix) :]: value for name, value in files.get(file, {}).items() if name.startswith(prefix)}
        unused -= {(file, prefix + name) for name in found}
        _fill(classifier, found, source / file, method)
        built[method] = classifier
    if unused:
        names = ", ".join(sorted(name for _, name in unused)[:6])
        raise RequestError(f"{source} contains tensors that no method uses: {names}. Copy the whole model folder again.")
    return built


def _empty(described: dict[str, Any], dim: int, classes: int, source: Path) -> RoutedClassifier:
    """A classifier with the described architecture and untrained parameters."""
    try:
        name, options, head = described["selector"], described["options"], described["head"]
        learned = {"dim": dim} if selector_class(name).learns else {}
        selector = create_selector(name, **learned, **options)
        return RoutedClassifier(selector, None if head is None else create_head(head["name"], dim, classes, **head["options"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"{source / CONFIG} does not describe its methods correctly: {error}. Save the model again.") from None


def _fill(module: nn.Module, found: dict[str, Tensor], path: Path, method: str) -> None:
    expected = module.state_dict()
    faults = [f"{name} is missing" for name in expected if name not in found]
    faults += [f"{name} is not part of this model" for name in found if name not in expected]
    faults += [
        f"{name} has shape {list(found[name].shape)}, expected {list(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    faults += [f"{name} has numbers of type {value.dtype}" for name, value in found.items() if not value.is_floating_point()]
    faults += [f"{name} contains NaN or infinite values" for name, value in found.items() if not bool(torch.isfinite(value).all())]
    if faults:
        raise RequestError(f"{path} does not fit '{method}': {'; '.join(faults[:6])}.")
    module.load_state_dict(found, strict=True)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch `module` to evaluation mode inside the block; afterwards every submodule has its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def select(selector: Selector, tokens: TokenBatch, k: int) -> tuple[Selection, Tensor | None]:
    """Select k tokens; also return the scores [B, N] that the patches were ranked by (None for mergers)."""
    if selector.stochastic and len(tokens) > 1:
        each = [select(selector, tokens.take([row]), k) for row in range(len(tokens))]
        return _joined([selection for selection, _ in each]), _cat([scores for _, scores in each])
    noise = torch.Generator().manual_seed(SEED) if selector.stochastic else None
    if isinstance(selector, Ranker) and tokens.places is None:
        with torch.no_grad():  # a ranking has no gradient
            scores = selector.score(selector.check(tokens), noise)
        return gather(tokens.patches, rank(scores)[:, :k]), scores
    return selector.select(tokens, k, noise), None


def select_above(selector: Selector, tokens: TokenBatch, guarantee: Guarantee) -> tuple[list[Selection], Tensor]:
    """Select what a guarantee keeps of each image; a selection of its own for each, because K differs, and the scores [B, N]."""
    if not isinstance(selector, Ranker) or selector.stochastic:
        raise RequestError(
            f"Selector '{selector.name}' does not rank patches by a score, so it cannot keep those above a threshold."
        )
    with torch.no_grad():
        scores = selector.score(selector.check(tokens))
    order = rank(scores)
    counts = guarantee.counts(scores.double().cpu().numpy()).tolist()
    return [gather(tokens.patches[row : row + 1], order[row : row + 1, :k]) for row, k in enumerate(counts)], scores


class Router:
    """A function from tokens to those that a selector keeps at a budget; `requires` are the signals that it reads."""

    def __init__(self, selector: Selector, budget: float) -> None:
        self.selector, self.budget = selector, budget
        self.requires = selector.requires

    @torch.inference_mode()
    def __call__(self, tokens: TokenBatch) -> Selection:
        return select(self.selector, tokens, self.selector.count(self.budget, tokens.n))[0]


def probabilities(classifier: RoutedClassifier, tokens: TokenBatch, budgets: Sequence[float]) -> Tensor:
    """Class probabilities [B, len(budgets), C]; heads that read the mean do not gather tokens."""
    selector, head = classifier.selector, classifier.required_head
    if head.reads == "mean":
        return head(pooled(selector, tokens, budgets)).softmax(-1)
    selections = (select(selector, tokens, selector.count(budget, tokens.n))[0] for budget in budgets)
    return torch.stack([head.read(selection, tokens.grid).softmax(-1) for selection in selections], 1)


def pooled(selector: Selector, tokens: TokenBatch, budgets: Sequence[float]) -> Tensor:
    """Pooled tokens at each budget, [B, len(budgets), D]."""
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
