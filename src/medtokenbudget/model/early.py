"""Early routing from a saved router: which way, with which router, on which backbone, and every reason why they do not fit.

`features/early.py` runs it; here a trained model becomes the function that chooses, and the settings that stores and models record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.errors import BudgetError, RequestError
from medtokenbudget.features.backbone import Backbone
from medtokenbudget.features.early import EarlyBackbone, EarlyRoute, Way
from medtokenbudget.features.preprocess import REC601
from medtokenbudget.features.routed_pass import Background
from medtokenbudget.routing import Ranker, budget_to_k

if TYPE_CHECKING:
    from medtokenbudget.model.routed import MedTokenBudget

BLOCK = 4
"""Where 'inside' prunes unless told otherwise."""
_INSIDE = ("attention_entropy", "cls_attention")
_SCOUT = (*_INSIDE, "luminance")
_FREE = ("layer", "attention", "name")
"""Fields of a fingerprint that may differ between a backbone and the one that an 'inside' router was trained on."""


@dataclass(frozen=True)
class EarlyRouting:
    """One way of early routing with its router.

    Attributes:
        router: A trained model whose main method ranks patches.
        way: 'scout', 'inside' or 'zoom'.
        budget: Share of the patches that is kept; for 'zoom' those whose box is cropped.
        block: First block that runs on the kept patches ('inside').
        background: What becomes of the others there ('inside').
        margin: Side of the crop over the side of the box ('zoom').
    """

    router: MedTokenBudget
    way: Way
    budget: float = 0.3
    block: int = BLOCK
    background: Background = "token"
    margin: float = 1.2

    @classmethod
    def parse(cls, text: str, router: MedTokenBudget, **options: Any) -> EarlyRouting:
        """From the text of `--route`: 'scout', 'zoom', 'block:4' or 'inside' (the same as 'block:4')."""
        name, colon, number = text.partition(":")
        if name == "block" and number.isdecimal():
            return cls(router, "inside", block=int(number), **options)
        if colon or name not in get_args(Way):
            raise RequestError(f"--route must be scout, zoom or block:N (such as block:{BLOCK}), got '{text}'.")
        return cls(router, name, **options)  # type: ignore[arg-type]

    @classmethod
    def of(cls, settings: dict[str, Any], router: MedTokenBudget) -> EarlyRouting:
        """From the settings that a store or a model recorded, with the router that they name."""
        if router.fingerprint != settings.get("router"):
            raise RequestError("The router beside this model is not the one that it was trained with. Copy the whole folder again.")
        known = {name: value for name, value in settings.items() if name not in ("k", "router")}
        try:
            return cls(router, **known)
        except TypeError as error:
            raise RequestError(f"The early routing of this model is not one of this version: {error}. Train it again.") from None

    def settings(self, k: int) -> dict[str, Any]:
        """JSON values: what tokens depend on beside the backbone."""
        own: dict[str, Any] = {"way": self.way, "budget": self.budget, "k": k, "router": self.router.fingerprint}
        if self.way == "inside":
            own |= {"block": self.block, "background": self.background}
        return own | ({"margin": self.margin} if self.way == "zoom" else {})

    def wrap(self, backbone: Backbone) -> EarlyBackbone:
        """The backbone with this route; it takes over the network.

        Raises:
            RequestError: Router, backbone and budget do not go together.
        """
        selector = self._selector()
        self.router.to(backbone.device)
        h, w = backbone.grid if self.way != "zoom" else self.router.grid
        k = _count(self.budget, h * w, selector.minimum)
        if self.way == "inside":
            self._check_inside(backbone)
            score: Callable[[Any], Tensor] = selector.score
        else:
            score = _scout(self.router, selector)
        route = EarlyRoute(
            way=self.way,
            k=k,
            score=score,
            grid=self.router.grid,
            size=int(self.router.backbone_fingerprint["image_size"]),
            settings=self.settings(k),
            requires=tuple(selector.requires),
            block=self.block,
            background=self.background,
            margin=self.margin,
        )
        return EarlyBackbone(backbone, route)

    def save(self, folder: Path) -> Path:
        """Save the router."""
        return self.router.save_pretrained(folder)

    def _selector(self) -> Ranker:
        router, name = self.router, self.router.main
        if "route" in router.backbone_fingerprint:
            raise RequestError("The router is itself routed early. Use a router that was trained on all patches.")
        selector = router.classifier().selector
        foreign = [field for field in selector.requires if field not in (_INSIDE if self.way == "inside" else _SCOUT)]
        if not isinstance(selector, Ranker) or selector.stochastic or foreign:
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
        return selector

    def _check_inside(self, backbone: Backbone) -> None:
        wanted = {key: value for key, value in backbone.fingerprint.items() if key not in _FREE}
        found = {key: self.router.backbone_fingerprint.get(key) for key in wanted}
        layer = self.router.backbone_fingerprint["layer"]
        if found != wanted:
            raise RequestError(
                f"--route block:{self.block} scores tokens of the backbone itself, but the router was trained on another backbone "
                f"or image size. Train one on a store of this backbone, extracted with --layer {self.block - 1}."
            )
        if layer != self.block - 1:
            raise RequestError(
                f"--route block:{self.block} scores the tokens of block {self.block - 1}, but the router was trained on those "
                f"of block {layer}. Use --route block:{layer + 1}, or train a router on a store with --layer {self.block - 1}."
            )


def _count(budget: float, n: int, minimum: int) -> int:
    k = budget_to_k(budget, n, 1)
    if k < minimum:
        lowest = float(Fraction(minimum, n))
        raise BudgetError(
            f"Budget {budget:g} keeps {k} of {n} patches, but the router's minimum is {minimum}. Use --budget {lowest:.3g} or more."
        )
    return k


def _scout(router: MedTokenBudget, selector: Ranker) -> Callable[[Tensor], Tensor]:
    """Scores [B, n] of images [B, 3, s, s], RGB in [0, 1]: the router's own backbone, then its selector."""
    backbone = router.backbone
    grid, preprocessing = backbone.grid, backbone.preprocessing

    def score(images: Tensor) -> Tensor:
        mean = torch.tensor(preprocessing.mean, device=images.device).view(1, 3, 1, 1)
        std = torch.tensor(preprocessing.std, device=images.device).view(1, 3, 1, 1)
        tokens = backbone.tokens((images - mean) / std)
        if "luminance" in selector.requires:
            gray = torch.einsum("bchw,c->bhw", images, torch.tensor(REC601, device=images.device))
            cells = F.avg_pool2d(gray.unsqueeze(1), images.shape[-1] // grid[0])
            tokens = replace(tokens, luminance=cells.flatten(1))
        return selector.score(tokens)

    return score
