"""ToMe of the paper (Bolya et al., 2023): similar tokens are merged, in rounds of bipartite matching, down to exactly K.

Vectorized over the batch. Merged tokens are means weighted by size, so that the mass is conserved. The publication compares the
keys of a block, which `compare='keys'` does too; then the keys of merged tokens are merged like the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.merging import RoundMerger


@register_selector("tome")
class ToMe(RoundMerger):
    """K tokens by bipartite soft matching on the cosine similarity of the patches; `weights` are the group sizes."""

    title = "ToMe"
    description = "Merges similar patches instead of dropping any, so it has purity but no retention."
    color, marker = "#6a51a3", "P"

    def merge_round(self, x: Tensor, size: Tensor, r: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Let every second token (set A) find its most similar token of the others (set B); the r best pairs merge."""
        # Bipartite soft matching of the publication; ties go to the first pair.
        b, n, d = x.shape
        unit = F.normalize(x[..., first:], dim=-1)
        similarity = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
        best, partner = similarity.max(-1)
        by_similarity = torch.argsort(best, dim=1, descending=True, stable=True)
        merged, stay = by_similarity[:, :r], by_similarity[:, r:].sort(1).values
        target = partner.gather(1, merged)

        mass = x * size.unsqueeze(-1)
        # B is copied, because A is added to it in place.
        mass_a, mass_b = mass[:, ::2], mass[:, 1::2].contiguous()
        size_a, size_b = size[:, ::2], size[:, 1::2].clone()
        # As rows of one [B |B|, D] tensor: several tokens of A may merge into one of B, which only index_add counts.
        rows = (target + mass_b.shape[1] * torch.arange(b, device=x.device).unsqueeze(1)).flatten()
        moved_mass = torch.take_along_dim(mass_a, merged.unsqueeze(-1), 1).reshape(-1, d)
        mass_b.view(-1, d).index_add_(0, rows, moved_mass)
        size_b.view(-1).index_add_(0, rows, size_a.gather(1, merged).flatten())

        kept = stay.shape[1]
        new_size = torch.cat([size_a.gather(1, stay), size_b], 1)
        new_mass = torch.cat([torch.take_along_dim(mass_a, stay.unsqueeze(-1), 1), mass_b], 1)
        moved = torch.empty(b, n, dtype=torch.int64, device=x.device)
        moved_a = torch.empty(b, partner.shape[1], dtype=torch.int64, device=x.device)
        moved_a.scatter_(1, stay, torch.arange(kept, device=x.device).expand(b, kept))
        moved_a.scatter_(1, merged, kept + target)
        moved[:, ::2] = moved_a
        moved[:, 1::2] = kept + torch.arange(size_b.shape[1], device=x.device)
        return new_mass / new_size.unsqueeze(-1), new_size, moved
