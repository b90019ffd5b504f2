"""DynamicViT and its package token against their formulas."""

from __future__ import annotations

import pytest
import torch

from medtokenbudget.config import TrainConfig
from tests.routing.batches import selector_of, tokens_of

N, K = 35, 9


def test_dynamicvit_keeps_the_highest_keep_probability_and_penalizes_the_ratio():
    tokens, selector = tokens_of(), selector_of("dynamicvit")
    logits = selector.predictor(tokens.patches).detach()
    kept = selector.select(tokens, K).kept
    for row in range(len(tokens)):
        best = logits[row].argsort(descending=True)[:K].tolist()
        assert sorted(best) == kept[row].nonzero().flatten().tolist()
    step = selector.training_pass(tokens, 0.5, TrainConfig())  # no generator, no noise
    ratios = [sum(value > 0 for value in row) / N for row in logits.tolist()]
    assert step.terms["ratio"].item() == pytest.approx(sum((ratio - 17 / N) ** 2 for ratio in ratios) / 3, abs=1e-6)
    assert step.weights["ratio"] == 2.0
    for row, values in enumerate(logits.tolist()):
        chosen = [i for i, value in enumerate(values) if value > 0] or [values.index(max(values))]
        torch.testing.assert_close(step.pooled[row], tokens.patches[row, chosen].mean(0), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_dynamicvit_looks_at_each_patch_and_at_the_mean_of_all():
    selector, tokens = selector_of("dynamicvit"), tokens_of()
    features = selector.predictor.features(tokens.patches)
    both = torch.cat([features[..., :16], features[..., 16:].mean(1, keepdim=True).expand(-1, N, -1)], -1)
    out = selector.predictor.decide(both)
    torch.testing.assert_close(selector.predictor(tokens.patches), out[..., 1] - out[..., 0])


@torch.no_grad()
def test_the_package_token_is_the_score_weighted_mean_of_the_pruned_patches():
    tokens, selector = tokens_of(), selector_of("dynamicvit-package")
    keep = torch.sigmoid(selector.predictor(tokens.patches))
    selection = selector.select(tokens, K)
    for row in range(len(tokens)):
        order = keep[row].argsort(descending=True).tolist()
        rest = order[K - 1 :]
        package = sum(keep[row, i] * tokens.patches[row, i] for i in rest) / keep[row, rest].sum()
        torch.testing.assert_close(selection.tokens[row, :-1], tokens.patches[row, order[: K - 1]])
        torch.testing.assert_close(selection.tokens[row, -1], package, atol=1e-5, rtol=1e-4)
