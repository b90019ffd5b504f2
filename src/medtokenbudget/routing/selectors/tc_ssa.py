"""TC-SSA, token compression by semantic slot aggregation (Chen et al., MICCAI 2026): patches go to their two best of K slots.

The gate, the aggregation and the three terms of its auxiliary loss are the published ones. Left out are the noise on the gate in
training, the network of each slot, which would move the tokens out of the space that heads read, and the vision-language model
behind it. A slot that no patch is routed to is zero in the publication; here it takes the patch that is nearest to it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.config import Count
from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.trainable import SoftMerger
from medtokenbudget.tokens import TokenBatch

_AUXILIARY, _ENTROPY, _SIZE = 0.1, 0.5, 1e-4
"""Weight of the auxiliary loss, and of two of its terms in it."""


@register_selector("tc-ssa")
class TCSSA(SoftMerger):
    """Slot tokens: means of the patches whose two largest gate probabilities include the slot, weighted with them.

    A slot that no patch is routed to takes the patch with its largest gate probability.
    """

    title = "TC-SSA"
    description = "Routes every patch to two of K learned slots."
    color, marker = "#5a5a9c", "8"

    def __init__(self, dim: int, routes: Count = 2, slots: Count = 256, minimum: int = 16) -> None:
        super().__init__(slots, minimum)
        self.routes = routes
        self.gate = nn.Linear(dim, slots)

    def attention(self, tokens: TokenBatch, k: int) -> Tensor:
        probability = self.gate(tokens.patches)[..., :k].float().softmax(-1)  # [B, N, k]
        routed = probability * self._routes(probability)
        empty = routed.sum(1, keepdim=True) == 0
        # The patch that is nearest to the slot: an empty one would be 0 / 0.
        favorite = F.one_hot(probability.argmax(1), tokens.n).transpose(1, 2).to(routed.dtype)
        routed = torch.where(empty, favorite, routed)
        return (routed / routed.sum(1, keepdim=True)).transpose(1, 2)

    def extra_terms(self, tokens: TokenBatch, k: int) -> dict[str, Tensor]:
        """Load balance `k sum(f p)` (f: share of patches routed there, p: mean gate), entropy of p, and the size of the logits."""
        logits = self.gate(tokens.patches)[..., :k].float()
        probability = logits.softmax(-1)
        p, f = probability.mean((0, 1)), self._routes(probability).mean((0, 1))
        # With one slot there is no entropy, and log 1 would be the divisor.
        entropy = 1 + (p * (p + 1e-8).log()).sum() / math.log(max(k, 2))
        size = logits.logsumexp(-1).mean().square()
        return {
            "balance": _AUXILIARY * k * (f * p).sum(),
            "entropy": _AUXILIARY * _ENTROPY * entropy,
            "logits": _AUXILIARY * _SIZE * size,
        }

    def _routes(self, probability: Tensor) -> Tensor:
        """1 at the slots that each patch goes to, [B, N, k]."""
        best = probability.topk(min(self.routes, probability.shape[-1]), dim=-1).indices
        return torch.zeros_like(probability).scatter(-1, best, 1.0)
