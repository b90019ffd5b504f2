"""SparseLearn (Chen et al., "Learnable Token Sparsification", 2026), after its abstract.

From there: a soft top-K gate lets each patch through with variance-preserving noise, a denoiser that sees one patch at a time
repairs it, and at inference the scorer's hard top-K alone remains. The forms of scorer, gate and denoiser are ours: the abstract
does not give them, and the vision-language model behind it is not here.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from medtokenbudget.config import TrainConfig
from medtokenbudget.routing.base import Ranker, register_selector
from medtokenbudget.routing.losses import lesion_term
from medtokenbudget.routing.topk import check_k, masked_mean
from medtokenbudget.routing.trainable import LearnedSelector, TrainingPass
from medtokenbudget.tokens import TokenBatch

_STEPS = 30
"""Halvings that find the threshold of the soft top-K."""


@register_selector("sparselearn")
class SparseLearn(LearnedSelector, Ranker):
    """The K patches with the highest learned score; gate and denoiser are used in training only."""

    title = "SparseLearn"
    description = "Learns scores through a soft top-K gate with noise."
    color, marker = "#4f6d2f", "h"

    def __init__(self, dim: int, hidden: int = 128, temperature: float = 0.5, minimum: int = 16) -> None:
        super().__init__(minimum)
        self.hidden, self.temperature = hidden, temperature
        self.scorer = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, 1))
        self.denoiser = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    @classmethod
    def from_config(cls, dim: int, config: TrainConfig, classes: int = 2) -> Self:
        return cls(dim, temperature=config.router.temperature, minimum=config.router.minimum)

    @classmethod
    def settings(cls, config: TrainConfig) -> tuple[str, ...]:
        return ("losses.lesion", "router.temperature") if config.recipe == "joint" else ("losses.lesion",)

    def score(self, tokens: TokenBatch, generator: torch.Generator | None = None) -> Tensor:
        return self.scorer(tokens.patches.float()).squeeze(-1).float()

    def training_pass(
        self, tokens: TokenBatch, budget: float, config: TrainConfig, generator: torch.Generator | None = None, route: bool = True
    ) -> TrainingPass:
        """Give the gate-weighted mean of noisy, denoised patches, and the lesion loss of the scores."""
        tokens = tokens.float()
        score = self.score(tokens)
        terms = {"lesion": lesion_term(score, tokens, config.losses.lesion)}
        weights = {"lesion": config.losses.lesion}
        if not route:
            return TrainingPass(None, terms, torch.sigmoid(score), weights)
        gate = soft_topk(score, self.count(budget, tokens.n), self.temperature)
        noisy = noise_gate(tokens.patches, gate, generator)
        restored = noisy + self.denoiser(noisy)
        return TrainingPass(masked_mean(restored, gate), terms, torch.sigmoid(score), weights, gate)


def soft_topk(scores: Tensor, k: int, temperature: float) -> Tensor:
    """Compute gates `sigmoid((s - t) / temperature)` in [0, 1] that sum to k, [B, N]; the threshold t is differentiated too."""
    n = scores.shape[1]
    k = check_k(k, n)
    # Only a threshold of -inf would open all gates.
    if k == n:
        return torch.ones_like(scores) + 0 * scores
    with torch.no_grad():
        # So far out every gate is 1 or 0 in fp32: the root lies between.
        low = scores.amin(1, keepdim=True) - 40 * temperature
        high = scores.amax(1, keepdim=True) + 40 * temperature
        for _ in range(_STEPS):
            middle = (low + high) / 2
            above = torch.sigmoid((scores - middle) / temperature).sum(1, keepdim=True) > k
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        threshold = (low + high) / 2
    gate = torch.sigmoid((scores - threshold) / temperature)
    # One Newton step: it changes the value by rounding only, and carries the gradient of the threshold.
    slope = (gate * (1 - gate)).sum(1, keepdim=True).detach().clamp_min(1e-6) / temperature
    threshold = threshold + (gate.sum(1, keepdim=True) - k) / slope
    return torch.sigmoid((scores - threshold) / temperature)


def noise_gate(patches: Tensor, gate: Tensor, generator: torch.Generator | None) -> Tensor:
    """Compute `sqrt(g) x + sqrt(1 - g) e` with noise e of each feature's mean and variance in the image; no generator, no noise."""
    open_, closed = gate.clamp(1e-6, 1).sqrt().unsqueeze(-1), (1 - gate).clamp(1e-6, 1).sqrt().unsqueeze(-1)
    mean, deviation = patches.mean(1, keepdim=True), patches.std(1, keepdim=True, correction=0)
    centered = patches - mean
    if generator is None:
        return mean + open_ * centered
    noise = torch.randn(patches.shape, generator=generator, device=generator.device).to(patches.device)
    return mean + open_ * centered + closed * deviation * noise
