"""The contract of a selector, and selectors by name. Rankers write `score`, all others write `choose`; the rest is inherited.

Other packages build on this file. `select` checks what it is given, so `score` and `choose` never need to.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from medtokenbudget.config import DEFAULT_BUDGET, DEFAULT_METHODS
from medtokenbudget.errors import CountError, GridError, MissingSignalError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.registry import Registry
from medtokenbudget.routing.topk import budget_to_k, check_k, rank
from medtokenbudget.tokens import SIGNALS, Selection, TokenBatch

Kind = Literal["ranker", "sampler", "merger"]


class Selector(ABC):
    """Reduces the N patches of an image to K tokens.

    Args:
        minimum: Fewest tokens kept at any budget.

    Attributes:
        name: Set by `register_selector`.
        title: Name in tables, figures and text; empty means `name`.
        description: What it does, in one sentence.
        color: Color in figures as `#rrggbb`; empty means one that follows from the name.
        marker: Matplotlib marker in figures.
        line: Matplotlib line style in figures.
        reference: Whether it is no competitor: it has no budget, or it sees the mask.
        in_default_sweep: Whether a sweep that names no methods includes it, for selectors of other packages.
        kind: A 'ranker' keeps the K best patches of one ranking. A 'sampler' keeps K unchanged patches, but those of a small K
            need not be kept at a larger one. A 'merger' makes K new tokens.
        learns: Whether it has parameters to train; see `LearnedSelector`.
        stochastic: Whether it draws from the generator that it is given.
        reads_routed: Whether it also reads tokens that were routed before or inside the backbone, which have no whole grid.
        reads_patches: Whether it reads patches or what a backbone says of them, and not only places, luminance or masks.
        reads_pixels: Whether its patches must be pixels, the tokens of the backbone 'pixels'.
        ablations: Names of parts that can be switched off after training, with `ablate`.
        variants: Options by name, for selectors that do not learn: `tome:keys` is `tome` with the options of its variant 'keys'.
        requires: Fields of `TokenBatch` that it reads in addition to the patches. With `has_mask`, every image needs a mask. An
            instance may read more than its class, by its options.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    description: ClassVar[str] = ""
    color: ClassVar[str] = ""
    marker: ClassVar[str] = "d"
    line: ClassVar[str] = "-"
    reference: ClassVar[bool] = False
    in_default_sweep: ClassVar[bool] = False
    kind: ClassVar[Kind]
    learns: ClassVar[bool] = False
    stochastic: ClassVar[bool] = False
    reads_routed: ClassVar[bool] = False
    reads_patches: ClassVar[bool] = True
    reads_pixels: ClassVar[bool] = False
    ablations: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    requires: tuple[str, ...] = ()

    def __init__(self, minimum: int = 16) -> None:
        if minimum < 1:
            raise CountError(f"The minimum number of kept tokens must be at least 1, got {minimum}.")
        self.minimum = minimum

    def options(self) -> dict[str, Any]:
        """Return the constructor options (all but `dim`) as JSON values, so that a saved model can build this selector again."""
        return SELECTORS.options(self, "dim")

    @abstractmethod
    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        """Give k tokens of each image of a batch that was checked, with k from 1 to N."""

    def select(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        """Give exactly k tokens of each image; `generator` is the source of all randomness."""
        k = check_k(k, tokens.n)
        return self.choose(self.check(tokens), k, generator)

    def count(self, budget: float | str, n: int) -> int:
        """Return the number of tokens given for n patches at a budget."""
        return budget_to_k(budget, n, self.minimum)

    def select_budget(self, tokens: TokenBatch, budget: float, generator: torch.Generator | None = None) -> Selection:
        return self.select(tokens, self.count(budget, tokens.n), generator)

    def __call__(
        self,
        tokens: Tensor,
        budget: float | str | None = None,
        k: int | None = None,
        *,
        prefix: int = 0,
        grid: tuple[int, int] | None = None,
        generator: torch.Generator | None = None,
        **signals: Tensor,
    ) -> Selection:
        """Select from the plain tokens of any vision transformer, with gradients to the tokens that are kept.

        Args:
            tokens: [B, N, D] patch tokens in raster order, or [B, P + N, D] with `prefix=P` tokens in front of them.
            budget: Share of the patches to keep, such as 0.3 or '30%'; by default `DEFAULT_BUDGET`.
            k: Number of tokens to keep, instead of a budget.
            prefix: Number of tokens in front of the patches. The first of them is read as the class token.
            grid: (h, w) of the patches; None if it is square.
            generator: Source of the noise of selectors that draw.
            signals: What the selector `requires`, by the name of the field of `TokenBatch`: `cls_attention=...` [B, N].
        """
        if not isinstance(tokens, Tensor) or not tokens.is_floating_point() or tokens.ndim != 3 or 0 in tokens.shape:
            given = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ShapeError(f"`tokens` must be a tensor of floats [B, N, D], got {given}.")
        b, n = tokens.shape[0], tokens.shape[1] - prefix
        if not isinstance(prefix, int) or prefix < 0 or n < 1:
            raise ShapeError(f"`prefix` must be the number of tokens in front of the patches, got {prefix} of {n + prefix} tokens.")
        side = math.isqrt(n)
        if grid is None and side * side != n:
            advice = "Pass their `grid=(h, w)`, or the number of tokens in front of them as `prefix`: 1 for a class token."
            raise GridError(f"{n} patches are no square. {advice}")
        if budget is not None and k is not None:
            raise RequestError("`budget` and `k` exclude each other. Leave out one of them.")
        known = [entry.name for entry in fields(TokenBatch) if entry.name not in ("patches", "grid", "places")]
        for name in signals:
            if name == "retention":
                advice = "Use a budget here."
                raise RequestError(f"`retention` needs a calibrated model: `model.route(images, retention=0.95)`. {advice}")
            if name not in known:
                raise UnknownNameError.of("signal", name, known)
        if "lesion" in signals:
            # A mask that is passed is there for every image of the batch.
            signals = {"has_mask": torch.ones(b, dtype=torch.bool, device=tokens.device), **signals}
        if prefix:
            signals = {"cls": tokens[:, 0], **signals}
        batch = TokenBatch(tokens[:, prefix:], (side, side) if grid is None else tuple(grid), **signals)  # type: ignore[arg-type]
        return self.select(batch, self.count(DEFAULT_BUDGET if budget is None else budget, n) if k is None else k, generator)

    def pooled(self, tokens: TokenBatch, budgets: Sequence[float], generator: torch.Generator | None = None) -> Tensor:
        """Return the pooled means at each budget, [B, len(budgets), D] in fp32."""
        return torch.stack([self.select_budget(tokens, budget, generator).pooled() for budget in budgets], dim=1)

    def check(self, tokens: TokenBatch) -> TokenBatch:
        """Return the batch itself, if it has what this selector reads, and that and its patches are finite."""
        if tokens.places is not None and not self.reads_routed:
            raise RequestError(
                f"Selector '{self.name}' chooses among all patches, but these tokens were routed before or inside the backbone. "
                "Use no-pruning, which reads them all."
            )
        if missing := [field for field in self.requires if getattr(tokens, field) is None]:
            stored = [field for field in missing if field in SIGNALS]
            advice = f"with the `signals` {' '.join(stored)}" if stored else "with it"
            raise MissingSignalError(
                f"Selector '{self.name}' reads {', '.join(missing)}, which this batch does not have. "
                f"Extract the tokens {advice}, pass it as `{missing[0]}` with plain tensors, or choose another selector."
            )
        if "has_mask" in self.requires and (without := int((~tokens.has_mask.bool()).sum())):  # type: ignore[union-attr]
            raise MissingSignalError(
                f"Selector '{self.name}' needs a mask for every image, but {without} of {len(tokens)} in this batch have none. "
                "Restrict the evaluation to images with masks."
            )
        return tokens.require_finite(self.requires)


class Ranker(Selector):
    """Keeps the K patches with the highest score; ties are broken by index."""

    kind: ClassVar[Kind] = "ranker"

    @abstractmethod
    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        """Give one finite number per patch, [B, N]; the highest are kept first."""

    def order(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return rank(self._scores(self.check(tokens), generator))

    @torch.no_grad()  # a ranking has no gradient
    def _scores(self, tokens: TokenBatch, generator: torch.Generator | None) -> Tensor:
        scores = self.score(tokens, generator)
        if tuple(scores.shape) != (len(tokens), tokens.n):
            raise ShapeError(f"Selector '{self.name}' must return scores {[len(tokens), tokens.n]}, got {list(scores.shape)}.")
        return scores

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        scores = self._scores(tokens, generator)
        return replace(gather(tokens.patches, rank(scores)[:, :k]), scores=scores)

    def pooled(self, tokens: TokenBatch, budgets: Sequence[float], generator: torch.Generator | None = None) -> Tensor:
        counts = [self.count(budget, tokens.n) for budget in budgets]
        return pooled_means(tokens.patches, self.order(tokens, generator), counts)


class Merger(Selector):
    """Makes K new tokens from the patches. Subclasses write `choose`, which gives a `Selection` with `kept` None."""

    kind: ClassVar[Kind] = "merger"
    ranks_by: ClassVar[str | None] = None


def gather(patches: Tensor, indices: Tensor) -> Selection:
    """Return the patches at `indices` [B, K] as a selection, in that order."""
    b, n, d = patches.shape
    rows = (indices + n * torch.arange(b, device=indices.device).unsqueeze(1)).flatten()
    return kept_at(patches.reshape(b * n, d).index_select(0, rows).view(*indices.shape, d), indices, n)


def kept_at(kept: Tensor, indices: Tensor, n: int) -> Selection:
    """Return the selection of patches [B, K, D] that are at `indices` [B, K] of a grid of n."""
    b, k = indices.shape
    order = torch.arange(k, device=indices.device).expand(b, k)
    assignment = torch.full((b, n), -1, device=indices.device).scatter_(1, indices, order)
    return Selection(kept, torch.ones(b, k, device=kept.device), assignment, kept=assignment >= 0, indices=indices)


def pooled_means(patches: Tensor, order: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute the means of the first K patches of `order` [B, N] for each K of `counts`, [B, len(counts), D] in fp32.

    The patches between two successive K are summed first (one product with a 0/1 matrix), then those few sums cumulatively.
    """
    b, n, _ = patches.shape
    steps = sorted({check_k(k, n) for k in counts})
    ends = torch.tensor(steps, device=order.device)
    # The inverse permutation: from a patch to its rank.
    ranks = torch.empty_like(order).scatter_(1, order, torch.arange(n, device=order.device).expand(b, n))
    # `right`, because a patch of rank K is not among the first K.
    stage = torch.bucketize(ranks, ends, right=True)
    member = (stage.unsqueeze(1) == torch.arange(len(steps), device=order.device).view(1, -1, 1)).float()
    means = torch.bmm(member, patches.float()).cumsum(1) / ends.view(1, -1, 1)
    return means[:, [steps.index(k) for k in counts]]


SELECTORS: Registry[Selector] = Registry("selector", Selector, "medtokenbudget.selectors")  # type: ignore[type-abstract]

register_selector = SELECTORS.register
list_selectors = SELECTORS.names
selector_class = SELECTORS.get


def default_methods() -> tuple[str, ...]:
    """Return what a sweep compares unless told otherwise: the methods of the paper, ours, the controls, and who asked for it."""
    return tuple(dict.fromkeys([*DEFAULT_METHODS, *(n for n in list_selectors() if selector_class(n).in_default_sweep)]))


def create_selector(name: str, **options: Any) -> Selector:
    """Create a selector by name.

    Args:
        name: One of `list_selectors()`.
        options: Options of the selector's class; selectors that learn need `dim`, the embedding dimension.

    Example:
        >>> create_selector("center").count(0.3, 256)
        76
        >>> create_selector("tome")(torch.rand(2, 197, 64), budget="30%", prefix=1).tokens.shape
        torch.Size([2, 58, 64])
    """
    return SELECTORS.create(name, **options)
