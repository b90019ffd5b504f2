"""SparseLearn: its gate, its noise, and its training pass as a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from medtokenbudget.config import TrainConfig
from medtokenbudget.routing.selectors.sparselearn import noise_gate, soft_topk
from tests.routing.batches import seeded, selector_of, tokens_of

N, K = 35, 9


def test_soft_top_k_sums_to_k_and_has_the_gradient_of_its_threshold():
    scores = torch.randn(2, 12, generator=seeded(), dtype=torch.float64).requires_grad_()
    gates = soft_topk(scores, 5, 0.5)
    torch.testing.assert_close(gates.sum(1), torch.full((2,), 5.0, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.autograd.gradcheck(lambda s: soft_topk(s, 5, 0.5), (scores,), atol=1e-4)
    # A shift of all scores changes nothing.
    torch.testing.assert_close(soft_topk(scores + 3, 5, 0.5), gates, atol=1e-6, rtol=0)
    assert soft_topk(scores, 12, 0.5).eq(1).all()


def test_the_noise_gate_preserves_the_variance_of_a_closed_patch():
    patches = torch.randn(1, 4000, 3, generator=seeded()) * torch.tensor([1.0, 2.0, 5.0]) + 7
    for openness in (1e-6, 0.5, 1.0):
        gated = noise_gate(patches, torch.full((1, 4000), openness), seeded(2))
        torch.testing.assert_close(gated.std(1), patches.std(1), atol=0.15, rtol=0.05)
        torch.testing.assert_close(gated.mean(1), patches.mean(1), atol=0.2, rtol=0)
    torch.testing.assert_close(noise_gate(patches, torch.ones(1, 4000), seeded()), patches, atol=0.03, rtol=0)


@torch.no_grad()
def test_sparselearn_ranks_by_its_scorer_and_trains_on_the_gated_mean_of_denoised_patches():
    tokens, selector = tokens_of(), selector_of("sparselearn")
    scores = selector.score(tokens)
    step = selector.training_pass(tokens, 0.5, TrainConfig())  # no generator, no noise
    for row, x in enumerate(tokens.patches):
        own = [selector.scorer(patch).item() for patch in x]
        assert scores[row].tolist() == pytest.approx(own, abs=1e-5)
        low, high = min(own) - 20, max(own) + 20
        for _ in range(100):  # the threshold at which the gates add up to K = 17
            middle = (low + high) / 2
            gates = [1 / (1 + math.exp(-(score - middle) / 0.5)) for score in own]
            low, high = (middle, high) if sum(gates) > 17 else (low, middle)
        mean, total = sum(x) / N, torch.zeros(32)
        for gate, patch in zip(gates, x):
            noisy = mean + math.sqrt(gate) * (patch - mean)
            total += gate * (noisy + selector.denoiser(noisy))
        torch.testing.assert_close(step.pooled[row], total / sum(gates), atol=1e-4, rtol=1e-3)
