"""Selectors that rank patches by what a classifier of their own looks at: attribution as a router.

The classifier (the probe) sees all patches and learns from labels; the patches that mattered to it are kept unchanged.

`grad-token`: behind a mean, every patch has the same gradient g / N, so gradient x token is `g . x_i / N`. Grad-CAM (Selvaraju et
al., ICCV 2017) weights the features with their mean gradient, which is g / N too, so it is the same map, cut at zero: one selector
stands for both.

`gradcam-norm1` and `relevance` need an attention to look at. The backbone is frozen and its stored tokens have no gradient through
its blocks, so the block that they differentiate is the probe's own, one pre-norm attention behind the backbone, trained from
labels; they say nothing about the backbone's blocks.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medtokenbudget.errors import RequestError
from medtokenbudget.routing.base import register_selector
from medtokenbudget.routing.trainable import GatedAttention, Probe


class ProbeHead(nn.Module):
    """The classifier of a probe: Linear, GELU, Linear. Its gradient is written out, so that ranking needs no backward pass."""

    def __init__(self, dim: int, classes: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, width)
        self.output = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits [B, C], and the gradient [B, dim] of the largest logit, for features [B, dim]; both in fp32."""
        before = self.hidden(features).float()
        logits = self.output(F.gelu(before)).float()
        # d gelu(h) / dh = Phi(h) + h phi(h)
        slope = 0.5 * (1 + torch.erf(before / math.sqrt(2))) + before * torch.exp(-before.square() / 2) / math.sqrt(2 * math.pi)
        return logits, (self.output.weight[logits.argmax(1)] * slope) @ self.hidden.weight


@register_selector("grad-token")
class GradToken(Probe):
    """Largest `g . x_i`, with g the gradient of the predicted class's logit at the mean patch."""

    title = "Gradient x token"
    description = "Keeps the patches that raise the predicted class of a probe."
    color, marker = "#2a7f7f", "h"

    def __init__(self, dim: int, classes: int = 2, width: int = 128, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.width = classes, width
        self.head = ProbeHead(dim, classes, width)

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        logits, gradient = self.head(patches.mean(1))
        return torch.bmm(patches, gradient.unsqueeze(-1)).squeeze(-1), logits


@register_selector("abmil-attention")
class ABMILAttention(Probe):
    """Largest gated attention of an attention-based MIL classifier (Ilse et al., ICML 2018) first."""

    title = "ABMIL attention"
    description = "Keeps the patches that a MIL classifier attends to."
    color, marker = "#5a5a9c", "h"

    def __init__(self, dim: int, classes: int = 2, width: int = 128, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.classes, self.width = classes, width
        self.features = nn.Linear(dim, width)
        self.attend = GatedAttention(width, width)
        self.output = nn.Linear(width, classes)

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        features = F.relu(self.features(patches))
        attention = self.attend(features).squeeze(-1).float()
        pooled = torch.bmm(attention.softmax(-1).unsqueeze(1), features.float()).squeeze(1)
        return attention, self.output(pooled)


class AttentionProbe(Probe):
    """A class token that attends to the patches, `softmax_n(q_h . k_hn / sqrt(d))`, and a classifier of what its heads gather.

    The class token is learned and the same for all images, so its query is a parameter.
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

    @abstractmethod
    def explain(self, normed: Tensor, weights: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        """Attribute the predicted class to the patches, [B, N], from one pass of the block with H heads of width d.

        Args:
            normed: [B, N, D] the patches after `norm1`.
            weights: [B, H, N] attention of the class token to the patches.
            values: [B, H, N, d].
            gradient: [B, H, d] of the largest logit, at what each head gathered.
        """

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm1(patches)
        keys, values = (part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2).float() for part in (self.key, self.value))
        weights = (torch.einsum("bhnd,hd->bhn", keys, self.query) / math.sqrt(self.query.shape[1])).softmax(-1)
        gathered = torch.einsum("bhn,bhnd->bhd", weights, values).flatten(1)
        logits, gradient = self.head(gathered)
        return self.explain(normed, weights, values, gradient.unflatten(-1, (self.heads, -1))), logits


@register_selector("gradcam-norm1")
class GradCAMNorm1(AttentionProbe):
    """Grad-CAM (Selvaraju et al., ICCV 2017) at `norm1` of the probe's block, as it is usually applied to vision transformers.

    Largest `w . norm1(x_i)`, with w the sum over the patches of the gradient of the predicted class at `norm1`. Grad-CAM's mean
    instead of the sum and its cut at zero do not change which patches come first.
    """

    title = "Grad-CAM at norm1"
    description = "Keeps the patches that Grad-CAM shows in a probe's block."
    color, marker = "#3f6f9f", "1"

    def explain(self, normed: Tensor, weights: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        # A change of all patches alike reaches the class through the values only, because attention weights sum to one: the
        # gradients through the keys cancel in the sum.
        weight = gradient.flatten(1) @ self.value.weight  # [B, D]
        return torch.bmm(normed, weight.unsqueeze(-1)).squeeze(-1)


@register_selector("relevance")
class Relevance(AttentionProbe):
    """Relevance by the gradient rule of Chefer et al. (ICCV 2021, "Generic Attention-model Explainability").

    Largest relevance of the class token's row, `mean_h max(0, A_hi g_h . v_hi)`, times N, where `g_h . v_hi` is the gradient of the
    predicted class at the attention weight `A_hi` of head h. The published rule starts from the identity and adds such a product
    block by block; here the probe's block is the only one, and each patch token counts as an input.
    """

    title = "Relevance"
    description = "Keeps the patches with the largest relevance in a probe's attention."
    color, marker = "#9f3f6f", "2"

    def explain(self, normed: Tensor, weights: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        of_weights = torch.einsum("bhd,bhnd->bhn", gradient, values)
        return normed.shape[1] * (of_weights * weights).clamp_min(0).mean(1)
