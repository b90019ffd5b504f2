"""Grad-CAM (Selvaraju et al., ICCV 2017) at `norm1` of an attention block, as it is usually applied to vision transformers.

The block is that of a probe behind the frozen backbone (see `attention_probe.py`), the gradient that of the probe's predicted
class at the normed patches that enter it. Grad-CAM averages this gradient over the patches. A change of all patches alike reaches
the class through the values only, because the attention weights always sum to one: the gradients through the keys cancel, and
what is left is written out here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medtokenbudget.routing.attention_probe import AttentionProbe
from medtokenbudget.routing.registry import register_selector


@register_selector("gradcam-norm1")
class GradCAMNorm1(AttentionProbe):
    """Largest `w . norm1(x_i)`, with w the sum over the patches of the gradient of the predicted class at `norm1`.

    Grad-CAM's mean instead of the sum and its cut at zero do not change which patches come first.
    """

    def attribute(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.attend(patches)
        weight = seen.gradient.flatten(1) @ self.value.weight  # [B, D]
        return torch.bmm(seen.normed, weight.unsqueeze(-1)).squeeze(-1), seen.logits
