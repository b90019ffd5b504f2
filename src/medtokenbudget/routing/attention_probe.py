"""The base of attributions that need an attention to look at: a probe whose class token attends to the patches.

The backbone is frozen and its stored tokens have no gradient through its blocks. So the block that these attributions
differentiate is the probe's own, one pre-norm attention behind the backbone, trained from labels; nothing is said about the
backbone's blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medtokenbudget.errors import RequestError
from medtokenbudget.routing.probe import Probe, ProbeHead


class Attended(NamedTuple):
    """One pass of the probe's block: H heads of width d.

    normed    [B, N, D] the patches after `norm1`
    weights   [B, H, N] attention of the class token to the patches
    values    [B, H, N, d]
    logits    [B, C]
    gradient  [B, H, d] of the largest logit, at what each head gathered
    """

    normed: Tensor
    weights: Tensor
    values: Tensor
    logits: Tensor
    gradient: Tensor


class AttentionProbe(Probe):
    """A class token that attends to the patches, `softmax_n(q_h . k_hn / sqrt(d))`, and a classifier of what its heads gather.

    The class token is learned and the same for all images, so its query is a parameter.

    Args:
        dim: Embedding dimension D of the tokens.
        classes: Classes of the probe.
        heads: Heads of the attention.
        width: Width of all heads together, and of the classifier.
        minimum: Fewest patches kept at any budget.
    """

    def __init__(self, dim: int, classes: int = 2, heads: int = 4, width: int = 128, minimum: int = 16) -> None:
        super().__init__(minimum)
        if heads < 1 or width % heads:
            raise RequestError(f"width must be a multiple of heads, got width={width} and heads={heads}.")
        self.classes, self.heads, self.width = classes, heads, width
        self.norm1 = nn.LayerNorm(dim)
        self.query = nn.Parameter(torch.randn(heads, width // heads))
        self.key = nn.Linear(dim, width)
        self.value = nn.Linear(dim, width)
        self.head = ProbeHead(width, classes, width)

    def attend(self, patches: Tensor) -> Attended:
        """One pass over patches [B, N, D]."""
        normed = self.norm1(patches)
        keys, values = (part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2).float() for part in (self.key, self.value))
        weights = (torch.einsum("bhnd,hd->bhn", keys, self.query) / math.sqrt(self.query.shape[1])).softmax(-1)
        gathered = torch.einsum("bhn,bhnd->bhd", weights, values).flatten(1)
        logits, gradient = self.head(gathered)
        return Attended(normed, weights, values, logits, gradient.unflatten(-1, (self.heads, -1)))
