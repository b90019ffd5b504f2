"""Early routing from a saved router: which way, with which router, on which backbone, and every reason why they do not fit.

`backbone/partial.py` runs it; here a trained model becomes the function that chooses, and the settings that are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.backbone.attention import REGISTRY
from medtokenbudget.backbone.backbone import REC601, Backbone
from medtokenbudget.backbone.partial import EarlyBackbone, EarlyRoute, Way
from medtokenbudget.config import DEFAULT_BUDGET, BackboneConfig, TrainConfig
from medtokenbudget.errors import BudgetError, RequestError
from medtokenbudget.heads.head import RoutedClassifier
from medtokenbudget.model.model import MedTokenBudget
from medtokenbudget.model.saved import SHIPPED
from medtokenbudget.routing import Merger, Ranker, Selector, budget_to_k, create_selector, list_selectors, selector_class
from medtokenbudget.tokens import TokenBatch

BLOCK = 4
"""Where 'inside' prunes by default."""
INSIDE = {*REGISTRY} - {"rollout"}
"""Signals that are known inside the backbone: the rollout multiplies the attention of all blocks."""
_READABLE = {"inside": INSIDE, "scout": {*REGISTRY, "luminance"}}  # luminance is known only to who sees the image
_FREE = ("layer", "attention", "pseudo_temperature", "name")
"""Fields of a fingerprint that may differ between a backbone and the one that an 'inside' router was trained on."""
Score = Callable[[TokenBatch], Tensor]
"""From tokens to scores [B, N]; the patches with the highest are kept."""


def parse_route(text: str) -> tuple[Way, int]:
    """Read the way and the block of a route: 'scout', 'block:4' or 'inside' (the same as 'block:4')."""
    name, _, number = text.partition(":")
    if name == "block" and number.isdecimal():
        return "inside", int(number)
    for way in get_args(Way):
        if way == text:
            return way, BLOCK
    raise RequestError(f"`route` must be scout or block:N (such as block:{BLOCK}), got '{text}'.")


@dataclass(frozen=True)
class EarlyRouting:
    """One way of early routing with its router.

    Attributes:
        router: A model whose main method ranks patches; `untrained_router` makes one of a method that needs no training.
        way: 'scout' or 'inside'.
        budget: Share of the patches that is kept.
        block: First block that runs on the kept patches ('inside').
    """

    router: MedTokenBudget
    way: Way
    budget: float = DEFAULT_BUDGET
    block: int = BLOCK

    @classmethod
    def of(cls, settings: dict[str, Any], router: MedTokenBudget) -> EarlyRouting:
        """Make one from the settings that a store or a model recorded, with the router that they name."""
        if router.fingerprint != settings.get("router"):
            raise RequestError("The router of this model is not the one that it was trained with. Copy the whole folder again.")
        try:
            return cls(router, **{name: value for name, value in settings.items() if name not in ("k", "router")})
        except TypeError as error:
            raise RequestError(f"The early routing of this model is not one of this version: {error}. Train it again.") from None

    def wrap(self, backbone: Backbone) -> EarlyBackbone:
        """Return the backbone with this route; it takes over the network."""
        selector, score = self._selector()
        # The scout runs in the same pass as the backbone.
        self.router.to(backbone.device)
        inside, n = self.way == "inside", backbone.grid[0] * backbone.grid[1]
        k = budget_to_k(self.budget, n, 1)
        if k < selector.minimum:
            raise BudgetError(
                f"Budget {self.budget:g} keeps {k} of {n} patches, but the router's minimum is {selector.minimum}. "
                f"Use `budget={float(Fraction(selector.minimum, n)):.3g}` or more."
            )
        size = int(self.router.backbone_fingerprint["image_size"])
        if inside:
            self._check_inside(backbone, selector)
        elif backbone.preprocessing.image_size < size:
            raise RequestError(
                f"The scout looks at images of {size} pixels, but the backbone at images of {backbone.preprocessing.image_size}. "
                f"Use `image_size={size}` or more."
            )
        settings: dict[str, Any] = {"way": self.way, "budget": self.budget, "k": k, "router": self.router.fingerprint}
        route = EarlyRoute(
            block=self.block if inside else 0,
            k=k,
            score=score if inside else self._scout(selector, score),
            grid=self.router.grid,
            size=size,
            settings=settings | ({"block": self.block} if inside else {}),
            requires=tuple(selector.requires),
        )
        return EarlyBackbone(backbone, route)

    def image_scores(self) -> Callable[[Tensor], Tensor]:
        """Return the function from images [B, 3, s, s] of the router's size, RGB in [0, 1], to scores [B, n] on its grid."""
        return self._scout(*self._selector())

    def save(self, folder: Path) -> Path:
        """Save the router."""
        return self.router.save_pretrained(folder)

    def _selector(self) -> tuple[Selector, Score]:
        """Return the router's selector, and the function by which it chooses patches."""
        router, name = self.router, self.router.main
        if "route" in router.backbone_fingerprint:
            raise RequestError("The router is itself routed early. Use a router that was trained on all patches.")
        selector = router.classifier().selector
        foreign = [field for field in selector.requires if field not in _READABLE[self.way]]
        score = ranking(selector)
        if score is None or selector.stochastic or foreign:
            kind = f"reads {', '.join(foreign)}" if foreign else "is random" if selector.stochastic else "merges patches"
            raise RequestError(
                f"The router's method '{name}' {kind}, so it cannot choose patches early. Use one that ranks patches."
            )
        router.check_lesions()
        if isinstance(selector, torch.nn.Module):
            selector.eval()
        return selector, score

    def _scout(self, selector: Selector, score: Score) -> Callable[[Tensor], Tensor]:
        """Return a function from images [B, 3, s, s], RGB in [0, 1], to scores [B, n]: the router's backbone, then its selector."""
        backbone = self.router.backbone
        signals = tuple(name for name in selector.requires if name in REGISTRY)

        def scores(images: Tensor) -> Tensor:
            if selector.reads_patches:
                mean, std = (
                    torch.tensor(values, device=images.device).view(1, 3, 1, 1)
                    for values in (backbone.preprocessing.mean, backbone.preprocessing.std)
                )
                tokens = backbone.tokens((images - mean) / std, signals)
            else:
                h, w = backbone.grid
                tokens = TokenBatch(images.new_zeros((images.shape[0], h * w, 1)), (h, w))
            if "luminance" in selector.requires:
                gray = torch.einsum("bchw,c->bhw", images, torch.tensor(REC601, device=images.device))
                cells = F.avg_pool2d(gray.unsqueeze(1), images.shape[-1] // backbone.grid[0])
                tokens = replace(tokens, luminance=cells.flatten(1))
            return score(tokens)

        return scores

    def _check_inside(self, backbone: Backbone, selector: Selector) -> None:
        if not 1 <= self.block <= backbone.layer:
            raise RequestError(
                f"`route` block:{self.block} does not exist: tokens come from block {backbone.layer}, so it can be block:1 to "
                f"block:{backbone.layer}."
            )
        if classless := [name for name in selector.requires if REGISTRY[name].needs_cls and not backbone.has_cls]:
            raise RequestError(
                f"The router's method '{self.router.main}' reads {', '.join(classless)}, but the backbone has no class token. "
                "Use another `router`."
            )
        wanted = {key: value for key, value in backbone.fingerprint.items() if key not in _FREE}
        trained_on = self.router.backbone_fingerprint
        before, layer = self.block - 1, trained_on["layer"]
        if {key: trained_on.get(key) for key in wanted} != wanted:
            raise RequestError(
                f"Routing at block {self.block} scores tokens of the backbone itself, but the router was trained on another "
                f"backbone or image size. Train one on a store of this backbone, extracted with `layer={before}`."
            )
        if layer != before:
            raise RequestError(
                f"Routing at block {self.block} scores the tokens of block {before}, but the router was trained on tokens of block "
                f"{layer}. Route at block {layer + 1}, or train a router on a store that was extracted with `layer={before}`."
            )


def ranking(selector: Selector) -> Score | None:
    """Return the function by which a selector ranks patches; None if it merges them all."""
    if isinstance(selector, Merger) and selector.ranks_by is not None:
        # Such a merger leaves the highest patches unchanged; the pruned network makes the token of the others itself.
        field = selector.ranks_by
        return lambda tokens: getattr(tokens, field).float()
    return selector.score if isinstance(selector, Ranker) else None


def is_untrained_router(name: str) -> bool:
    """Tell whether `name` is a selector and not a model; a folder of that name wins."""
    return name not in SHIPPED and name in list_selectors() and not Path(name).exists()


def untrained_router(name: str, way: Way, backbone: BackboneConfig, block: int = BLOCK) -> MedTokenBudget:
    """Make a router without a head from a selector that does not learn, such as 'evit', 'frequency' or 'center'.

    It reads the tokens of the routed backbone itself ('inside'), or looks with the embedded backbone ('scout').
    """
    if selector_class(name).learns:
        store = f"this backbone, extracted with `layer={block - 1}`" if way == "inside" else "a small backbone"
        raise RequestError(
            f"The selector '{name}' learns, so it cannot choose before it is trained. Train it with `mtb train` on a store of "
            f"{store}, and pass the run as `router`."
        )
    looks_with = backbone if way == "inside" else BackboneConfig(name="embedded")
    fingerprint = Backbone.load(looks_with).fingerprint
    if way == "inside":
        # Inside, the patches are chosen from the tokens that enter the block.
        looks_with, fingerprint = replace(looks_with, layer=block - 1), {**fingerprint, "layer": block - 1}
    classifiers = {name: RoutedClassifier(create_selector(name), None)}
    return MedTokenBudget(looks_with, fingerprint, (), classifiers, TrainConfig(), main=name, device="cpu")
