"""Gradient x token as a router: the patches that raise the predicted class of a classifier behind the mean of all patches.

Behind a mean, every patch has the same gradient g / N, so gradient x token is `g . x_i / N`. Grad-CAM (Selvaraju et al., ICCV 2017)
weights the features with their mean gradient, which is g / N too, so it is the same map, cut at zero: one selector stands for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.probe import Probe, ProbeHead
from medtokenbudget.routing.registry import register_selector


@register_selector("grad-token")
class GradToken(Probe):
    """Largest `g . x_i`, with g the gradient of the predicted class's logit at the mean patch.

    Args:
        dim: Embedding dimension D of the tokens.
        classes: Classes of the probe.
        width: Width of the probe.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(self, dim: int, classes: int = 2, width: int = 128, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.width = classes, width
        self.head = ProbeHead(dim, classes, width)

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        logits, gradient = self.head(patches.mean(1))
        return torch.bmm(patches, gradient.unsqueeze(-1)).squeeze(-1), logits
