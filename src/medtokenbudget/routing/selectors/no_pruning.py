"""NoPruning of the paper: the full-token reference, which keeps every patch at every budget.

It is in each sweep so that each table has its line; its K is N, whatever the budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.router import budget_to_k, check_k
from medtokenbudget.routing.selector import Ranker, routed_before
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("no-pruning")
class NoPruning(Ranker):
    """All patches, in raster order; a valid k or budget is accepted and has no effect.

    Of tokens that were routed before or inside the backbone it keeps all K, in the order of the router.
    """

    reads_routed = True

    def count(self, budget: float, n: int) -> int:
        budget_to_k(budget, n, self.minimum)
        return n

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(len(tokens), tokens.n, device=tokens.patches.device)

    def select(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        check_k(k, tokens.n)
        if tokens.places is not None:
            return routed_before(self.check(tokens))
        return super().select(tokens, tokens.n, generator)
