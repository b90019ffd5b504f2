"""DPC-KNN: density peaks clustering with nearest neighbors (Du et al., 2016), as TCFormer clusters tokens (Zeng et al., CVPR 2022).

Post-backbone form: one clustering of the final tokens. TCFormer weighs the tokens of a cluster with learned scores; here all count
alike. Its code counts a token among its own nearest neighbors; here, as in the formula, they are others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.config import Count
from medtokenbudget.routing.base import Merger, register_selector
from medtokenbudget.routing.merging import merge, nearest_center, squared_distances
from medtokenbudget.routing.topk import rank
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("dpc-knn")
class DPCKNN(Merger):
    """Centers are the K patches with the largest density times distance to a denser patch; the others join the nearest center."""

    title = "DPC-KNN"
    description = "Merges patches into clusters around density peaks."
    color, marker = "#94651f", "*"

    def __init__(self, neighbors: Count = 5, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.neighbors = neighbors

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        # As in TCFormer's code, over the dimension: else the densities `exp(-d^2)` vanish where tokens are long.
        squared = squared_distances(tokens.patches) / tokens.dim
        centers = rank(peaks(squared, self.neighbors))[:, :k]
        return merge(tokens.patches, nearest_center(squared, centers), k)


def peaks(squared: Tensor, neighbors: int) -> Tensor:
    """Multiply density and separation of each patch, from squared distances `[B, N, N]` to `[B, N]`.

    The density is `exp(-mean of the squared distances to the nearest neighbors)`, the separation the distance to the nearest denser
    patch (for the densest: to the farthest patch). Of two equally dense patches the first counts as denser.
    """
    n = squared.shape[1]
    # The smallest distance is the patch's own, zero.
    nearest = squared.topk(min(neighbors + 1, n), dim=2, largest=False).values[:, :, 1:]
    density = (-nearest.sum(2) / max(nearest.shape[2], 1)).exp()
    places = torch.arange(n, device=squared.device)
    earlier = places.unsqueeze(0) < places.unsqueeze(1)
    this, other = density.unsqueeze(2), density.unsqueeze(1)
    denser = (other > this) | ((other == this) & earlier)
    distances = squared.sqrt()
    separation = distances.masked_fill(~denser, torch.inf).amin(2)
    return density * torch.where(separation.isinf(), distances.amax(2), separation)
