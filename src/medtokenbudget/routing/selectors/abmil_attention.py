"""ABMIL attention as a router: the patches that an attention-based MIL classifier (Ilse et al., ICML 2018) attends to most."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.routing.layers import GatedAttention
from medtokenbudget.routing.probe import Probe
from medtokenbudget.routing.registry import register_selector


@register_selector("abmil-attention")
class ABMILAttention(Probe):
    """Largest gated attention of a classifier that sees all patches first.

    Args:
        dim: Embedding dimension D of the tokens.
        classes: Classes of the probe.
        width: Width of the features and of the attention.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(self, dim: int, classes: int = 2, width: int = 128, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.width = classes, width
        self.features = nn.Linear(dim, width)
        self.attend = GatedAttention(width, width)
        self.output = nn.Linear(width, classes)

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        features = F.relu(self.features(patches))
        attention = self.attend(features).squeeze(-1).float()
        pooled = torch.bmm(attention.softmax(-1).unsqueeze(1), features.float()).squeeze(1)
        return attention, self.output(pooled)
