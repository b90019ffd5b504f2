"""TC-SSA, token compression by semantic slot aggregation (Chen et al., 2026): patches are routed to their two best of K slots.

After the abstract and the published description: a gate with sparse top-2 routing, weighted aggregation, and the regularizers for
load balance and for the size of the logits. Its semantic-affinity and entropy terms are not specified there and are left out, and
so is the vision-language model behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.soft import SoftMerger
from medtokenbudget.tokens import TokenBatch

_BALANCE, _SIZE = 1e-2, 1e-3
"""Weights of the regularizers, as is usual for sparse routing."""


@register_selector("tc-ssa")
class TCSSA(SoftMerger):
    """Slot tokens: means of the patches whose two largest gate probabilities include the slot, weighted with them.

    A slot that no patch is routed to takes the patch with its largest gate probability.

    Args:
        dim: Embedding dimension D of the tokens.
        routes: Slots that a patch goes to.
        slots: Largest number of tokens.
        minimum: Fewest tokens kept at any budget.
    """

    def __init__(self, dim: int, routes: int = 2, slots: int = 256, minimum: int = 16) -> None:
        super().__init__(slots, minimum)
        self.routes = routes
        self.gate = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, slots))

    def attention(self, tokens: TokenBatch, k: int) -> Tensor:
        probability = self.gate(tokens.patches)[..., :k].float().softmax(-1)  # [B, N, k]
        best, where = probability.topk(min(self.routes, k), dim=-1)
        routed = torch.zeros_like(probability).scatter(-1, where, best / best.sum(-1, keepdim=True))
        empty = routed.sum(1, keepdim=True) == 0
        favorite = F.one_hot(probability.argmax(1), tokens.n).transpose(1, 2).to(routed.dtype)
        routed = torch.where(empty, favorite, routed)
        return (routed / routed.sum(1, keepdim=True)).transpose(1, 2)

    def extra_terms(self, tokens: TokenBatch, k: int) -> dict[str, Tensor]:
        """Load balance `k sum(f p)` (f: share of patches routed there first, p: mean gate), and the squared log-sum of logits."""
        logits = self.gate(tokens.patches)[..., :k].float()
        probability = logits.softmax(-1)
        first = F.one_hot(probability.argmax(-1), k).float()
        balance = k * (first.mean((0, 1)) * probability.mean((0, 1))).sum()
        return {"balance": _BALANCE * balance, "logits": _SIZE * logits.logsumexp(-1).square().mean()}
