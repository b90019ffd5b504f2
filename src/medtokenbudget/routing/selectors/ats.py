"""ATS, adaptive token sampling (Fayyaz et al., ECCV 2022): inverse transform sampling of the class attention.

Post-backbone form, with one difference from the paper. It keeps exactly K tokens: the paper draws K samples, of which some hit the
same token; here samples are added until K tokens are hit. The samples are at the quantiles of the paper, `1/2M, 3/2M, ...`; the
published code stretches the cumulative sum to [0, 1] and spaces the samples from its smallest value to 1.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from medtokenbudget.routing.base import Kind, Selector, gather, register_selector
from medtokenbudget.routing.topk import rank
from medtokenbudget.tokens import Selection, TokenBatch

_STEPS = 14
"""Halvings that find the number of samples, up to 2^14 K."""


@register_selector("ats")
class ATS(Selector):
    """Patches hit by evenly spaced samples of the cumulative significance `a_i |v_i| / sum(a_j |v_j|)`.

    a is the class attention and v the value vector of a patch; the cumulative sum runs from the least significant patch to the
    most significant one, as in the published code, and a sample hits the patch whose sum is nearest. Unlike the K highest, the
    samples also reach less attended parts of the image. A patch kept at a small budget need not be kept at a larger one.
    """

    title = "ATS"
    description = "Samples patches in proportion to class attention times the norm of their values."
    color, marker = "#2a7f7f", "X"
    kind: ClassVar[Kind] = "sampler"
    requires = ("cls_attention", "value_norm")

    def choose(self, tokens: TokenBatch, k: int, generator: torch.Generator | None = None) -> Selection:
        assert tokens.cls_attention is not None
        assert tokens.value_norm is not None
        # In float64: cumulative sums of some hundred small numbers decide which patch a sample hits.
        significance = tokens.cls_attention.double() * tokens.value_norm.double()
        ascending, places = significance.sort(dim=1, stable=True)
        hit = torch.zeros_like(places, dtype=torch.bool).scatter_(1, places, sampled(ascending, k))
        # Hit patches first, then by significance: exactly K, also where samples hit some more or fewer.
        best = rank(hit.double() + significance / (1 + significance.amax(1, keepdim=True)))[:, :k]
        return gather(tokens.patches, best)


def sampled(significance: Tensor, k: int) -> Tensor:
    """Mark the patches hit by the fewest evenly spaced samples that hit at least k, `[B, N]` to bool `[B, N]`.

    With M samples at `(i + 1/2) / M`, a patch is hit if its value of the cumulative distribution is the nearest to one of them.
    """
    total = significance.sum(1, keepdim=True).clamp_min(torch.finfo(significance.dtype).tiny)
    reached = (significance / total).cumsum(1)
    # Nearer to a patch than to the next one: up to the middle between both.
    upper = torch.cat([(reached[:, 1:] + reached[:, :-1]) / 2, torch.ones_like(total)], 1)
    low = torch.full_like(total, k - 1, dtype=torch.long)
    high = torch.full_like(low, k << _STEPS)
    # The number of hits grows with M, up to small steps back: halving ends at an M with enough hits whose predecessor has too few.
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        enough = _hits(upper, middle).sum(1, keepdim=True) >= k
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return _hits(upper, high)


def _hits(upper: Tensor, samples: Tensor) -> Tensor:
    """Tell whether one of M samples is in (upper[i - 1], upper[i]]: the number of samples below rises there."""
    below = (upper * samples + 0.5).floor()
    return torch.diff(below, dim=1, prepend=torch.zeros_like(below[:, :1])) > 0
