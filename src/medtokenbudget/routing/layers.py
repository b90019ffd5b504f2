"""Layers that selectors and heads share: seeded dropout and gated attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_LEVELS = 1 << 16
_LOWEST = -(1 << 15)


def dropout(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Zero elements of x with probability p (rounded to 1 / 65,536) and scale the others so that the mean stays.

    The noise comes from `generator` (torch's own when None), so that a resumed training repeats the very same masks. Drawing 16
    random bits an element instead of a uniform float also makes it several times faster on a CPU.
    """
    dropped = round(p * _LEVELS)
    if dropped == 0:
        return x
    device = x.device if generator is None else generator.device
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=device)
    # The full range must be named: a bare random_() never sets the sign bit, and every fourth element would be biased.
    bits = words.random_(-(1 << 63), None, generator=generator).view(torch.int16)[: x.numel()]
    # The comparison writes floats: no bool tensor, no conversion.
    keep = torch.ge(bits.to(x.device).view(x.shape), _LOWEST + dropped, out=torch.empty_like(x, requires_grad=False))
    return x * keep.mul_(_LEVELS / (_LEVELS - dropped))


class GatedAttention(nn.Module):
    """Attention logits [B, K, branches] of features h [B, K, dim]: `w . (tanh(V h) * sigmoid(U h))` (Ilse et al., 2018, Eq. 9)."""

    def __init__(self, dim: int, width: int, branches: int = 1) -> None:
        super().__init__()
        self.value = nn.Linear(dim, width)
        self.gate = nn.Linear(dim, width)
        self.output = nn.Linear(width, branches)

    def forward(self, features: Tensor) -> Tensor:
        return self.output(torch.tanh(self.value(features)) * torch.sigmoid(self.gate(features)))
