"""Relevance by the gradient rule of Chefer et al. (ICCV 2021, "Generic Attention-model Explainability"): `mean_h (grad A * A)+`.

The rule starts from the identity and adds, block by block, `mean_h (grad A_h * A_h)+` times the relevance so far. The block here
is that of a probe behind the frozen backbone (see `attention_probe.py`), whose class token attends to the patches; the gradient
is that of the probe's predicted class at its attention weights. The blocks of the backbone, whose attention of all heads and
whose gradients are not stored, are not part of the product: each patch token counts as an input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.attention_probe import AttentionProbe
from medtokenbudget.routing.registry import register_selector


@register_selector("relevance")
class Relevance(AttentionProbe):
    """Largest relevance of the class token's row, `mean_h max(0, A_hi g_h . v_hi)`, times N.

    `g_h . v_hi` is the gradient of the predicted class at the attention weight `A_hi` of head h.
    """

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.attend(patches)
        gradient = torch.einsum("bhd,bhnd->bhn", seen.gradient, seen.values)
        return patches.shape[1] * (gradient * seen.weights).clamp_min(0).mean(1), seen.logits
