"""Attributions of a probe against gradients by autograd and plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import MissingSignalError, RequestError
from medtokenbudget.routing import create_selector
from tests.routing.batches import seeded, selector_of, softmax, tokens_of

N, K = 35, 9


def test_gradient_times_token_and_grad_cam_coincide_behind_a_mean():
    tokens, selector = tokens_of(), selector_of("grad-token")
    scores = selector.score(tokens).detach()
    for row in range(len(tokens)):
        x = tokens.patches[row].clone().requires_grad_()
        logits = selector.head.output(torch.nn.functional.gelu(selector.head.hidden(x.mean(0))))
        (gradient,) = torch.autograd.grad(logits.max(), x)
        gradient_times_token = (gradient * x).sum(1)
        grad_cam = torch.relu((x * gradient.mean(0)).sum(1))  # weights: the mean gradient of each feature
        torch.testing.assert_close(scores[row] / N, gradient_times_token, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(gradient_times_token.clamp_min(0), grad_cam, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["grad-token", "gradcam-norm1", "relevance"])
def test_a_ranking_by_gradient_needs_no_gradient(name):
    with torch.inference_mode():
        assert selector_of(name).select(tokens_of(), K).kept.sum(1).tolist() == [K] * 3


def probe_by_hand(selector, x, attention=None):
    """Logits of an attention probe for one image, normed patches u, and the attention of each head, as plain loops."""
    u = selector.norm1(x)
    d = selector.query.shape[1]
    weights, gathered = [], []
    for h in range(selector.heads):
        part = slice(h * d, (h + 1) * d)
        keys, values = selector.key(u)[:, part], selector.value(u)[:, part]
        logits = torch.stack([(selector.query[h] * keys[n]).sum() / d**0.5 for n in range(len(x))])
        weights.append(logits.softmax(0) if attention is None else attention[h])
        gathered.append(sum(weights[h][n] * values[n] for n in range(len(x))))
    logits = selector.head.output(torch.nn.functional.gelu(selector.head.hidden(torch.cat(gathered))))
    return logits, u, weights


def test_grad_cam_at_norm1_is_the_mean_gradient_of_the_probes_class_times_the_normed_patches():
    tokens, selector = tokens_of(), selector_of("gradcam-norm1")
    scores = selector.score(tokens).detach()
    for row in range(len(tokens)):
        logits, u, _ = probe_by_hand(selector, tokens.patches[row])
        (gradient,) = torch.autograd.grad(logits.max(), u)
        grad_cam = [float((gradient.mean(0) * u[n]).sum()) for n in range(N)]
        torch.testing.assert_close(scores[row] / N, torch.tensor(grad_cam), atol=1e-6, rtol=1e-3)


def test_relevance_is_the_positive_part_of_attention_times_its_gradient_averaged_over_heads():
    tokens, selector = tokens_of(), selector_of("relevance")
    scores = selector.score(tokens).detach()
    for row in range(len(tokens)):
        _, _, weights = probe_by_hand(selector, tokens.patches[row])
        leaves = [w.detach().clone().requires_grad_() for w in weights]
        logits, _, _ = probe_by_hand(selector, tokens.patches[row], leaves)
        gradients = torch.autograd.grad(logits.max(), leaves)
        expected = [sum(max(0.0, float(g[n] * w[n])) for g, w in zip(gradients, leaves)) / len(leaves) for n in range(N)]
        torch.testing.assert_close(scores[row] / N, torch.tensor(expected), atol=1e-6, rtol=1e-3)


@torch.no_grad()
def test_abmil_attention_ranks_by_the_gated_attention_of_its_classifier():
    tokens, selector = tokens_of(), selector_of("abmil-attention")
    for row in range(len(tokens)):
        features = [torch.relu(selector.features(x)) for x in tokens.patches[row]]
        attend = selector.attend
        expected = [attend.output(torch.tanh(attend.value(h)) * torch.sigmoid(attend.gate(h))).item() for h in features]
        assert selector.score(tokens)[row].tolist() == pytest.approx(expected, abs=1e-5)
        pooled = sum(share * h for share, h in zip(softmax(expected), features))
        torch.testing.assert_close(selector.attribute(tokens.patches)[1][row], selector.output(pooled), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["grad-token", "gradcam-norm1", "relevance", "abmil-attention", "cropr"])
def test_a_probe_learns_from_labels_and_not_through_the_selection(name):
    tokens, selector = replace(tokens_of(), label=torch.tensor([0, 1, -1])), selector_of(name)
    step = selector.training_pass(tokens, 0.5, TrainConfig(), seeded())
    assert not step.pooled.requires_grad
    logits = selector.attribute(tokens.patches)[1]
    expected = torch.nn.functional.cross_entropy(logits[:2], tokens.label[:2])
    torch.testing.assert_close(step.terms[selector.term], expected)
    with pytest.raises(MissingSignalError, match="class labels"):
        selector.training_pass(replace(tokens, label=None), 0.5, TrainConfig(), seeded())


def test_the_heads_of_a_probe_share_its_width():
    with pytest.raises(RequestError, match="multiple of heads"):
        create_selector("relevance", dim=32, heads=3, width=128)
