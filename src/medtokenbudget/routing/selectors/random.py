"""Random of the paper: K patches drawn without looking.

The line that every selector must beat, in retention at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.selector import Ranker
from medtokenbudget.tokens import TokenBatch


@register_selector("random")
class Random(Ranker):
    """Uniformly drawn patches; the budgets of one draw are nested.

    seed  of the generator that each call makes for itself when it is given none
    """

    stochastic = True

    def __init__(self, seed: int = 0, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.seed = seed

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed) if generator is None else generator
        # float64: with 24-bit uniforms two of some hundred patches tie now and then, and ties favour low indices.
        draw = torch.rand(len(tokens), tokens.n, generator=generator, device=generator.device, dtype=torch.float64)
        return draw.to(tokens.patches.device)
