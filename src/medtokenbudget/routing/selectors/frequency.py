"""Frequency-aware token reduction (Lee et al., NeurIPS 2025): high-frequency tokens stay, the others become one DC token.

Post-backbone form: the paper splits tokens by the high-pass part of the attention, `A - 11'/n`, at several blocks, and reweights
the attention of the next ones. Here the same high-pass filter is applied to the final tokens, `x - mean(x)`, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.merging import with_rest
from medtokenbudget.routing.registry import register_selector
from medtokenbudget.routing.router import check_k, rank
from medtokenbudget.routing.selector import Merger
from medtokenbudget.tokens import Selection, TokenBatch


@register_selector("frequency")
class Frequency(Merger):
    """The K - 1 patches with the most high-frequency energy `|x_i - mean(x)|`, and the mean of all others (DC token)."""

    def select(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        k = check_k(k, tokens.n)
        order = rank(high_frequency(self.check(tokens).patches))
        return with_rest(tokens.patches, order[:, : k - 1])


def high_frequency(patches: Tensor) -> Tensor:
    """Norm of each patch after the mean patch of the image is taken away, `[B, N, D]` to `[B, N]`."""
    x = patches.float()
    return torch.linalg.vector_norm(x - x.mean(1, keepdim=True), dim=-1)
