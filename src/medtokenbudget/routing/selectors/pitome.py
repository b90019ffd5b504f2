"""PiToMe (Tran et al., "Spectrum-Preserving Token Merging", NeurIPS 2024): merges large similar groups, protects isolated tokens.

Post-backbone form: published PiToMe merges a few tokens in every block, with the margin `0.9 - 0.9 l / L` of block l; here rounds
on the final tokens go down to exactly K, with one margin.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.merging import Compared, RoundMerger, cosine_similarities
from medtokenbudget.routing.topk import rank


@register_selector("pitome")
class PiToMe(RoundMerger):
    """K tokens by rounds of merging among the patches with the highest energy; `weights` are the group sizes."""

    title = "PiToMe"
    description = "Merges patches of large similar groups first, protects isolated ones."
    color, marker = "#5a5a9c", "P"

    def __init__(self, margin: float = 0.45, compare: Compared = "patches", minimum: int = 16) -> None:
        super().__init__(compare, minimum)
        self.margin = margin

    def merge_round(self, x: Tensor, size: Tensor, r: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Of the 2r tokens with the highest energy, merge every second one into its most similar of the other r."""
        b, n, _ = x.shape
        similarity = cosine_similarities(x[..., first:])
        order = rank(energy(similarity, self.margin))
        source, target, stay = order[:, : 2 * r : 2], order[:, 1 : 2 * r : 2], order[:, 2 * r :]
        pairs = similarity.take_along_dim(source.unsqueeze(2), 1).take_along_dim(target.unsqueeze(1), 2)  # [B, r, r]
        keep = torch.cat([target, stay], 1).sort(1).values
        place = torch.full((b, n), -1, device=x.device).scatter_(1, keep, torch.arange(n - r, device=x.device).expand(b, n - r))
        moved = place.scatter(1, source, place.gather(1, target.gather(1, pairs.argmax(2))))
        member = F.one_hot(moved, n - r).to(x.dtype).transpose(1, 2) * size.unsqueeze(1)
        total = member.sum(2)
        return torch.bmm(member, x) / total.unsqueeze(-1), total, moved


def energy(similarity: Tensor, margin: float) -> Tensor:
    """Average `s` if `s >= margin`, else `exp(s - margin) - 1`, over the other tokens: `[B, n, n]` to `[B, n]`."""
    counted = torch.where(similarity >= margin, similarity, F.elu(similarity - margin))
    itself = torch.eye(similarity.shape[1], dtype=torch.bool, device=similarity.device)
    return counted.masked_fill(itself, 0).sum(2) / max(similarity.shape[1] - 1, 1)
