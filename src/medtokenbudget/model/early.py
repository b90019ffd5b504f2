"""Early routing from a saved router: which way, with which router, on which backbone, and every reason why they do not fit.

`backbone/partial.py` runs it; here a trained model becomes the function that chooses, and the settings that stores and models
record.
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

from medtokenbudget.backbone.backbone import Backbone
from medtokenbudget.backbone.partial import EarlyBackbone, EarlyRoute, Way
from medtokenbudget.backbone.preprocess import REC601
from medtokenbudget.backbone.stored_signals import REGISTRY
from medtokenbudget.config import DEFAULT_BUDGET, BackboneConfig, TrainConfig
from medtokenbudget.errors import BudgetError, RequestError
from medtokenbudget.model.model import MedTokenBudget
from medtokenbudget.model.saved import SHIPPED
from medtokenbudget.routing import Merger, Ranker, Selector, budget_to_k, create_selector, list_selectors, selector_class
from medtokenbudget.tokens import TokenBatch
from medtokenbudget.training.classifier import RoutedClassifier

BLOCK = 4
"""Where 'inside' prunes unless told otherwise."""
_INSIDE = tuple(name for name in REGISTRY if name != "rollout")
_SCOUT = (*REGISTRY, "luminance")
Score = Callable[[TokenBatch], Tensor]
"""Scores [B, N] of tokens; the highest are kept."""
_FREE = ("layer", "attention", "pseudo_temperature", "name")
"""Fields of a fingerprint that may differ between a backbone and the one that an 'inside' router was trained on."""


def parse_route(text: str) -> tuple[Way, int]:
    """Read the way and the block of `--route`: 'scout', 'block:4' or 'inside' (the same as 'block:4')."""
    name, colon, number = text.partition(":")
    if name == "block" and number.isdecimal():
        return "inside", int(number)
    for way in get_args(Way):
        if way == name and not colon:
            return way, BLOCK
    raise RequestError(f"--route must be scout or block:N (such as block:{BLOCK}), got '{text}'.")


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
            raise RequestError("The router beside this model is not the one that it was trained with. Copy the whole folder again.")
        known = {name: value for name, value in settings.items() if name not in ("k", "router")}
        try:
            return cls(router, **known)
        except TypeError as error:
            raise RequestError(f"The early routing of this model is not one of this version: {error}. Train it again.") from None

    def settings(self, k: int) -> dict[str, Any]:
        """Return as JSON values what tokens depend on beside the backbone."""
        settings: dict[str, Any] = {"way": self.way, "budget": self.budget, "k": k, "router": self.router.fingerprint}
        return settings | ({"block": self.block} if self.way == "inside" else {})

    def wrap(self, backbone: Backbone) -> EarlyBackbone:
        """Return the backbone with this route; it takes over the network.

        Raises:
            RequestError: Router, backbone and budget do not go together.
        """
        selector, chooses = self._selector()
        self.router.to(backbone.device)
        h, w = backbone.grid
        k = _count(self.budget, h * w, selector.minimum)
        if self.way == "inside":
            self._check_inside(backbone, selector)
            score: Callable[[Any], Tensor] = chooses
        else:
            score = _scout(self.router, selector, chooses)
        route = EarlyRoute(
            way=self.way,
            k=k,
            score=score,
            grid=self.router.grid,
            size=int(self.router.backbone_fingerprint["image_size"]),
            settings=self.settings(k),
            requires=tuple(selector.requires),
            block=self.block,
        )
        return EarlyBackbone(backbone, route)

    def save(self, folder: Path) -> Path:
        """Save the router."""
        return self.router.save_pretrained(folder)

    def _selector(self) -> tuple[Selector, Score]:
        """Return the router's selector, and the function by which it chooses patches."""
        router, name = self.router, self.router.main
        if "route" in router.backbone_fingerprint:
            raise RequestError("The router is itself routed early. Use a router that was trained on all patches.")
        selector = router.classifier().selector
        foreign = [field for field in selector.requires if field not in (_INSIDE if self.way == "inside" else _SCOUT)]
        chooses = _score_of(selector)
        if chooses is None or selector.stochastic or foreign:
            kind = f"reads {', '.join(foreign)}" if foreign else "is random" if selector.stochastic else "merges patches"
            raise RequestError(
                f"The router's method '{name}' {kind}, so it cannot choose patches early. Use one that ranks patches."
            )
        masks = router.info.get("run", {}).get("masks")
        if selector.learns and (router.train_config.losses.lesion <= 0 or masks == 0):
            raise RequestError(
                f"The router's method '{name}' was trained without lesion masks, so it does not know where the lesion is. "
                "Use a router that was trained with masks, such as `mtb train` makes by default."
            )
        if isinstance(selector, torch.nn.Module):
            selector.eval()
        return selector, chooses

    def _check_inside(self, backbone: Backbone, selector: Selector) -> None:
        classless = [name for name in selector.requires if REGISTRY[name].needs_cls and not backbone.has_cls]
        if classless:
            raise RequestError(
                f"The router's method '{self.router.main}' reads {', '.join(classless)}, but the backbone has no class token. "
                "Use another --router."
            )
        wanted = {key: value for key, value in backbone.fingerprint.items() if key not in _FREE}
        trained_on = {key: self.router.backbone_fingerprint.get(key) for key in wanted}
        layer = self.router.backbone_fingerprint["layer"]
        if trained_on != wanted:
            raise RequestError(
                f"--route block:{self.block} scores tokens of the backbone itself, but the router was trained on another backbone "
                f"or image size. Train one on a store of this backbone, extracted with --layer {self.block - 1}."
            )
        if layer != self.block - 1:
            raise RequestError(
                f"--route block:{self.block} scores the tokens of block {self.block - 1}, but the router was trained on those "
                f"of block {layer}. Use --route block:{layer + 1}, or train a router on a store with --layer {self.block - 1}."
            )


def _score_of(selector: Selector) -> Score | None:
    """Return what the patches are chosen by: the scores of a ranker, or what a merger ranks those by that it leaves as they are."""
    if isinstance(selector, Ranker):
        return selector.score
    field = selector.ranks_by if isinstance(selector, Merger) else None
    return None if field is None else lambda tokens: getattr(tokens, field).float()


def _count(budget: float, n: int, minimum: int) -> int:
    k = budget_to_k(budget, n, 1)
    if k < minimum:
        lowest = float(Fraction(minimum, n))
        raise BudgetError(
            f"Budget {budget:g} keeps {k} of {n} patches, but the router's minimum is {minimum}. Use --budget {lowest:.3g} or more."
        )
    return k


def _scout(router: MedTokenBudget, selector: Selector, chooses: Score) -> Callable[[Tensor], Tensor]:
    """Return a function from images [B, 3, s, s], RGB in [0, 1], to scores [B, n]: the router's backbone, then its selector."""
    backbone = router.backbone
    signals = tuple(name for name in selector.requires if name in REGISTRY)
    grid, preprocessing = backbone.grid, backbone.preprocessing

    def score(images: Tensor) -> Tensor:
        mean = torch.tensor(preprocessing.mean, device=images.device).view(1, 3, 1, 1)
        std = torch.tensor(preprocessing.std, device=images.device).view(1, 3, 1, 1)
        tokens = backbone.tokens((images - mean) / std, signals)
        if "luminance" in selector.requires:
            gray = torch.einsum("bchw,c->bhw", images, torch.tensor(REC601, device=images.device))
            cells = F.avg_pool2d(gray.unsqueeze(1), images.shape[-1] // grid[0])
            tokens = replace(tokens, luminance=cells.flatten(1))
        return chooses(tokens)

    return score


def is_untrained_router(name: str) -> bool:
    """Tell whether `name` is a selector and not a model; a folder of that name wins."""
    return name not in SHIPPED and name in list_selectors() and not Path(name).exists()


def untrained_router(name: str, way: Way, backbone: BackboneConfig, block: int = BLOCK) -> MedTokenBudget:
    """Make a router by the name of its selector, without a head.

    Args:
        name: A selector that does not learn, such as 'class-attention', 'evit', 'frequency' or 'center'.
        way: 'inside' reads the tokens of the backbone itself; 'scout' looks with the embedded backbone.
        backbone: The backbone that will be routed.
        block: The first block that will run on the kept patches ('inside').

    Raises:
        RequestError: The selector learns, so that it must be trained first.
    """
    if selector_class(name).learns:
        store = f"a store of this backbone (mtb extract --layer {block - 1})" if way == "inside" else "a store of a small backbone"
        raise RequestError(
            f"The selector '{name}' learns, so it cannot choose before it is trained. Train it on {store} with "
            f"mtb train --selector {name}, and pass the run as --router."
        )
    looks_with = backbone if way == "inside" else BackboneConfig(name="embedded")
    fingerprint = Backbone.load(looks_with).fingerprint
    if way == "inside":
        looks_with, fingerprint = replace(looks_with, layer=block - 1), {**fingerprint, "layer": block - 1}
    classifiers = {name: RoutedClassifier(create_selector(name), None)}
    return MedTokenBudget(looks_with, fingerprint, (), classifiers, TrainConfig(), main=name, device="cpu")
