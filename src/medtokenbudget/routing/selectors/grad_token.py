"""Gradient x token as a router: the patches that raise the predicted class of a classifier behind the mean of all patches.

Behind a mean, every patch has the same gradient g / N, so gradient x token is `g . x_i / N`. Grad-CAM (Selvaraju et al., ICCV 2017)
weights the features with their mean gradient, which is g / N too, so it is the same map, cut at zero: one selector stands for both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.routing.probe import Probe
from medtokenbudget.routing.registry import register_selector


@register_selector("grad-token")
class GradToken(Probe):
    """Largest `g . x_i`, with g the gradient of the predicted class's logit at the mean patch.

    The probe is Linear, GELU, Linear; its gradient is written out, so that ranking needs no backward pass.

    Args:
        dim: Embedding dimension D of the tokens.
        classes: Classes of the probe.
        width: Width of the probe.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(self, dim: int, classes: int = 2, width: int = 128, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.width = classes, width
        self.hidden = nn.Linear(dim, width)
        self.output = nn.Linear(width, classes)

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        before = self.hidden(patches.mean(1)).float()
        logits = self.output(F.gelu(before)).float()
        # d gelu(h) / dh = Phi(h) + h phi(h)
        slope = 0.5 * (1 + torch.erf(before / math.sqrt(2))) + before * torch.exp(-before.square() / 2) / math.sqrt(2 * math.pi)
        gradient = (self.output.weight[logits.argmax(1)] * slope) @ self.hidden.weight  # [B, D]
        return torch.bmm(patches, gradient.unsqueeze(-1)).squeeze(-1), logits
