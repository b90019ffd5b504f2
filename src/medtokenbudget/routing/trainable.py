"""The bases of selectors that learn: each gives a training pass and its own loss terms, the trainer does the rest.

`ScoredRanker` learns one score per patch, `SoftMerger` mixes all patches into K tokens, `Probe` ranks patches by what a classifier
of its own looks at.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from medtokenbudget.config import LossWeights, RouterConfig, TrainConfig
from medtokenbudget.errors import CountError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.routing.base import Merger, Ranker, Selector
from medtokenbudget.routing.losses import classification_loss, lesion_mass_loss, lesion_term, scorer_terms
from medtokenbudget.routing.topk import hard_topk, masked_mean, smooth_scores, straight_through_topk
from medtokenbudget.tokens import Selection, TokenBatch, TokenSet

Config = TypeVar("Config", bound=Any)


@dataclass(frozen=True)
class TrainingPass:
    """What one training pass of a selector gives.

    Attributes:
        pooled: [B, D] what the head reads, with a gradient to the selector; None if the selector was asked to train alone.
        terms: The selector's own loss terms by name, unweighted.
        weights: Weight of each term in the total loss; a term without one counts once.
        scores: [B, N] scores of the patches (or [B, T] of a sample of them), for monitoring.
        mask: [B, N] differentiable mask of the kept patches, where the selector has one.
        mixed: What a selector that makes new tokens selects; heads that read tokens need this or `mask`.
    """

    pooled: Tensor | None
    terms: Mapping[str, Tensor]
    scores: Tensor
    weights: Mapping[str, float] = field(default_factory=dict)
    mask: Tensor | None = None
    mixed: Selection | None = None

    def token_set(self, tokens: TokenBatch) -> TokenSet | None:
        if self.mixed is not None:
            return TokenSet.of(self.mixed, tokens.grid)
        return None if self.mask is None else TokenSet.under(self.mask, tokens.patches, tokens.grid)


class LearnedSelector(Selector, nn.Module):
    """A selector with parameters. Its class takes `dim`, the embedding dimension, first.

    Subclasses call `super().__init__(minimum)` before they add modules.
    """

    learns: ClassVar[bool] = True

    def __init__(self, minimum: int = 16) -> None:
        nn.Module.__init__(self)
        Selector.__init__(self, minimum)

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        """Create a selector for tokens of dimension `dim` from the settings of a training; `classes` is for those that classify."""
        return cls(dim, minimum=config.router.minimum)  # type: ignore[misc]

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        """Return dotted names of what it reads of `config` in addition to what every training does; 'router' is all of that part.

        A setting that no method of a run reads is refused. Override this to have more refused than `lats` and `context`.
        """
        return ("patches", "router", "curriculum", "losses")

    def min_steps(self, config: TrainConfig) -> int:
        """Return the fewest steps that its training takes on small data sets."""
        return config.min_steps

    @abstractmethod
    def training_pass(
        self, tokens: TokenBatch, budget: float, config: TrainConfig, generator: torch.Generator | None = None, route: bool = True
    ) -> TrainingPass:
        """Run the differentiable pass of a training step.

        Args:
            tokens: A batch in fp32, with labels and lesion patches where known.
            budget: Token budget of this step.
            config: Settings of the training (loss weights, sampled patches, ...).
            generator: Source of all noise, so that a resumed training repeats it.
            route: False trains the selector alone, from its own terms; `pooled` is then None.
        """

    def ablate(self, name: str | None) -> Self:
        """Switch off the part called `name` (one of `ablations`) of a trained selector; None switches all on again."""
        if name is not None:
            raise UnknownNameError.of(f"ablation of {self.name}", name, self.ablations)
        return self


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch `module` to evaluation mode inside the block; afterwards every submodule is in its earlier mode."""
    # Only parts in training mode are touched: a graph that is compiled or exported changes no module.
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class Sight(NamedTuple):
    """What a selector sees of a batch in one pass."""

    scores: Tensor
    """[B, N]."""
    lesion: Tensor
    """Lesion probability [B, h, w], on the finest grid that the selector has."""
    features: TokenBatch
    """What tells whether an image is familiar: the tokens themselves, or [B, 1, D] of a network that reads the image."""


class ScoredRanker(LearnedSelector, Ranker):
    """Keeps the patches with the highest score, smoothed as `router` says. Subclasses write `logits`."""

    finer: ClassVar[bool] = False
    """Whether it sees more than the tokens: its lesion map is finer than their grid, and its features are its own."""

    def __init__(self, router: RouterConfig) -> None:
        super().__init__(router.minimum)
        self.router = router

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        terms = tuple(f"losses.{term.name}" for term in fields(LossWeights) if term.name != "classification")
        return (*terms, "router.temperature") if config.recipe == "joint" else terms

    @abstractmethod
    def logits(self, tokens: TokenBatch, generator: torch.Generator | None = None, at: Tensor | None = None) -> Tensor:
        """Give raw score logits [B, N] (or [B, T] at the patches `at`), with noise in training mode: what the losses see."""

    def sample(self, tokens: TokenBatch, patches: int, generator: torch.Generator | None) -> Tensor | None:
        """Draw the numbers [B, T] of the patches that a step learns from, without replacement; None means all."""
        if not 0 < patches < tokens.n:
            return None
        # Ranks of uniform draws are a sample without replacement, with another one for each image.
        draw = torch.rand(len(tokens), tokens.n, generator=generator)
        return draw.argsort(1)[:, :patches].to(tokens.patches.device)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        """Score the patches, [B, N] in [0, 1], smoothed, without dropout and noise whatever the mode."""
        with evaluating(self):
            return self.smoothed(torch.sigmoid(self.logits(tokens)), tokens.grid)

    def see(self, tokens: TokenBatch) -> Sight:
        scores = self.score(tokens)
        return Sight(scores, scores.unflatten(1, tokens.grid), tokens)

    def smoothed(self, scores: Tensor, grid: tuple[int, int]) -> Tensor:
        return smooth_scores(scores, grid, self.router.smooth, self.router.padding)

    def training_pass(
        self, tokens: TokenBatch, budget: float, config: TrainConfig, generator: torch.Generator | None = None, route: bool = True
    ) -> TrainingPass:
        """Give raw scores, the mean under the straight-through mask, and the paper's scorer losses.

        With `route` False the scorer may learn from a sample of `config.patches` patches of each image. Without a generator there
        is no Gumbel noise.
        """
        if route and config.patches:
            raise RequestError("The joint recipe routes whole images, so it learns from all patches: `patches` must be 0.")
        tokens = tokens.float()
        k = self.count(budget, tokens.n)
        at = None if route else self.sample(tokens, config.patches, generator)
        # Before the sigmoid too: the lesion loss is stable on logits alone.
        score_logits = self.logits(tokens, generator, at)
        scores = torch.sigmoid(score_logits)
        mask = None
        if route:
            mask = straight_through_topk(self.smoothed(scores, tokens.grid), k, self.router.temperature, generator)
        # As in the paper, the losses see the raw scores and the selection the smoothed ones.
        with torch.autocast(scores.device.type, enabled=False):
            terms = scorer_terms(
                scores,
                score_logits=score_logits,
                k=k,
                budget=budget,
                weights=config.losses,
                lesion=_at(tokens.lesion, at),
                has_mask=tokens.has_mask,
                cls_attention=_at(tokens.cls_attention, at),
            )
        pooled = None if mask is None else masked_mean(tokens.patches, mask)
        return TrainingPass(pooled, terms, scores, {name: getattr(config.losses, name) for name in terms}, mask)


def _at(values: Tensor | None, at: Tensor | None) -> Tensor | None:
    return values if values is None or at is None else values.take_along_dim(at, 1)


class SoftMerger(LearnedSelector, Merger):
    """K tokens `sum_n A[k, n] x_n`, whose weights A sum to one over the patches. Subclasses write `attention`.

    The published methods have a fixed number of tokens. Here the tokens are ordered: at a budget of K tokens the first K of `slots`
    are used. A slot that no training budget reached keeps its initial weights.
    """

    def __init__(self, slots: int, minimum: int) -> None:
        super().__init__(minimum)
        self.slots = slots

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        # Even when trained alone, it makes as many tokens as the budget of the epoch asks for.
        return ("losses.lesion", "curriculum.kind", "curriculum.start")

    @abstractmethod
    def attention(self, tokens: TokenBatch, k: int) -> Tensor:
        """Give the share of each patch in each of the first k tokens, [B, k, N] in fp32; rows sum to one."""

    def extra_terms(self, tokens: TokenBatch, k: int) -> dict[str, Tensor]:
        """Return loss terms of its own in addition to the lesion loss."""
        return {}

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        return self._mix(tokens.patches, self._attention(tokens.float(), k))

    def _mix(self, patches: Tensor, attention: Tensor) -> Selection:
        # A patch stands for as many tokens as it takes part in: its shares, normalized over the tokens.
        shares = attention / attention.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        mixed = torch.bmm(attention, patches.float()).to(patches.dtype)
        return Selection(mixed, weights=shares.sum(2), assignment=attention.argmax(1), attention=attention)

    def _attention(self, tokens: TokenBatch, k: int) -> Tensor:
        if k > self.slots:
            advice = f"Create it with slots={k} or more, or use a smaller budget."
            raise CountError(f"Selector '{self.name}' has {self.slots} slots, so it cannot give {k} tokens. {advice}")
        return self.attention(tokens, k)

    def training_pass(
        self, tokens: TokenBatch, budget: float, config: TrainConfig, generator: torch.Generator | None = None, route: bool = True
    ) -> TrainingPass:
        """Give the K tokens' mean, the lesion loss on its attention, and the selector's own terms."""
        tokens = tokens.float()
        k = self.count(budget, tokens.n)
        attention = self._attention(tokens, k)
        # What the head reads is the mean of the tokens, so this is the share of each patch in it.
        mean = attention.mean(1)
        terms = {"lesion": lesion_term(mean, tokens, config.losses.lesion, lesion_mass_loss), **self.extra_terms(tokens, k)}
        weights = {"lesion": config.losses.lesion}
        if not route:
            return TrainingPass(None, terms, mean * tokens.n, weights)
        mixed = self._mix(tokens.patches, attention)
        return TrainingPass(mixed.pooled(), terms, mean * tokens.n, weights, mixed=mixed)


class Probe(LearnedSelector, Ranker):
    """Ranks patches by an attribution of the prediction of its own classifier, the probe, which sees all patches.

    Subclasses take `dim` and `classes` and write `attribute`.
    """

    term: ClassVar[str] = "probe"
    """Name of the probe's classification loss among the terms."""

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        return cls(dim, classes, minimum=config.router.minimum)  # type: ignore[call-arg, misc]

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        return ("losses.lesion", "losses.classification")

    @abstractmethod
    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Give the attribution of each patch [B, N], of any scale, and the probe's class logits [B, C], for patches [B, N, D]."""

    def relative(self, scores: Tensor) -> Tensor:
        """Return what the lesion loss sees as logits [B, N]: attributions have no natural zero, so their mean takes its place."""
        return scores - scores.mean(1, keepdim=True)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return self.attribute(tokens.patches.float())[0]

    def training_pass(
        self, tokens: TokenBatch, budget: float, config: TrainConfig, generator: torch.Generator | None = None, route: bool = True
    ) -> TrainingPass:
        """Give the mean of the hard top-K, through which no gradient reaches the probe, the probe's loss, and the lesion loss."""
        tokens = tokens.float()
        scores, logits = self.attribute(tokens.patches)
        relative = self.relative(scores)
        terms = {"lesion": lesion_term(relative, tokens, config.losses.lesion)}
        weights = {"lesion": config.losses.lesion, self.term: config.losses.classification}
        if config.losses.classification:
            if tokens.label is None:
                raise MissingSignalError(
                    f"Selector '{self.name}' learns from class labels, which this batch does not have. Label the images."
                )
            terms[self.term] = classification_loss(logits, tokens.label)
        # Hard and detached: the head must not change what the probe looks at.
        mask = hard_topk(scores.detach(), self.count(budget, tokens.n)).float() if route else None
        pooled = None if mask is None else masked_mean(tokens.patches, mask)
        return TrainingPass(pooled, terms, torch.sigmoid(relative), weights, mask)


def with_options(
    selector: str, options: Mapping[str, Any], scorer: Config, router: RouterConfig, training_only: tuple[str, ...] = ()
) -> tuple[Config, RouterConfig]:
    """Return the settings of a scorer and of its router with `options` in place of their fields; a name of both is the scorer's.

    Fields in `training_only` are read by the trainer, not by a selector, so as options they are refused.
    """
    of_scorer, of_router = ({entry.name for entry in fields(config)} - set(training_only) for config in (scorer, router))
    if unknown := [name for name in options if name not in of_scorer | of_router]:
        raise RequestError(
            f"Selector '{selector}' cannot be created with {', '.join(unknown)}: "
            f"its options are {', '.join(sorted(of_scorer | of_router))}."
        )
    return (
        replace(scorer, **{name: value for name, value in options.items() if name in of_scorer}),
        replace(router, **{name: value for name, value in options.items() if name not in of_scorer}),
    )


_LEVELS = 1 << 16
_LOWEST = -(1 << 15)


def dropout(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Zero elements of x with probability p (rounded to 1 / 65,536) and scale the others so that the mean stays.

    The noise comes from `generator` (torch's own when None), so that a resumed training repeats the very same masks. Drawing 16
    random bits an element instead of a uniform float also makes it several times faster on a CPU.
    """
    dropped = round(p * _LEVELS)
    if dropped == 0:
        return x
    device = x.device if generator is None else generator.device
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=device)
    # The full range must be named: a bare random_() never sets the sign bit, and every fourth element would be biased.
    bits = words.random_(-(1 << 63), None, generator=generator).view(torch.int16)[: x.numel()]
    # The comparison writes floats: no bool tensor, no conversion.
    keep = torch.ge(bits.to(x.device).view(x.shape), _LOWEST + dropped, out=torch.empty_like(x, requires_grad=False))
    return x * keep.mul_(_LEVELS / (_LEVELS - dropped))


class GatedAttention(nn.Module):
    """Attention logits [B, K, branches] of features h [B, K, dim]: `w . (tanh(V h) * sigmoid(U h))` (Ilse et al., 2018, Eq. 9)."""

    def __init__(self, dim: int, width: int, branches: int = 1) -> None:
        super().__init__()
        self.value = nn.Linear(dim, width)
        self.gate = nn.Linear(dim, width)
        self.output = nn.Linear(width, branches)

    def forward(self, features: Tensor) -> Tensor:
        return self.output(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features)))
