"""The learned selectors against their formulas, written as plain loops over one image."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from medtokenbudget.config import TrainConfig
from medtokenbudget.errors import CountError, MissingSignalError, RequestError, UnknownNameError
from medtokenbudget.routing import create_selector
from medtokenbudget.routing.losses import lesion_mass_loss
from medtokenbudget.routing.selectors.sparselearn import noise_gate, soft_topk
from medtokenbudget.runs.method import Method
from tests.routing.batches import selector_of, tokens_of

N, K = 35, 9


def noise(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    shares = [math.exp(value - top) for value in values]
    return [share / sum(shares) for share in shares]


@torch.no_grad()
def test_tokenlearner_tokens_are_mixtures_by_the_softmax_of_each_map():
    tokens, selector = tokens_of(), selector_of("tokenlearner")
    selection = selector.select(tokens, K)
    for row in range(len(tokens)):
        logits = selector.maps(tokens.patches[row])
        for slot in range(K):
            shares = softmax(logits[:, slot].tolist())
            expected = sum(share * x for share, x in zip(shares, tokens.patches[row]))
            torch.testing.assert_close(selection.tokens[row, slot], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_query_pool_is_attention_of_learned_queries():
    tokens, selector = tokens_of(), selector_of("query-pool")
    selection = selector.select(tokens, K)
    for row in range(len(tokens)):
        keys = selector.keys(tokens.patches[row])
        for slot in range(K):
            shares = softmax([float(selector.queries[slot] @ key) / 8 for key in keys])
            expected = sum(share * x for share, x in zip(shares, tokens.patches[row]))
            torch.testing.assert_close(selection.tokens[row, slot], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_tc_ssa_routes_each_patch_to_its_two_best_slots():
    tokens, selector = tokens_of(), selector_of("tc-ssa")
    selection = selector.select(tokens, K)
    for row in range(len(tokens)):
        gates = [softmax(line[:K].tolist()) for line in selector.gate(tokens.patches[row])]
        received: list[dict[int, float]] = [{} for _ in range(K)]
        for patch, gate in enumerate(gates):
            first, second = sorted(range(K), key=lambda s, g=gate: -g[s])[:2]
            for slot in (first, second):
                received[slot][patch] = gate[slot]
        for slot, shares in enumerate(received):
            if not shares:
                shares = {max(range(N), key=lambda p, s=slot, g=gates: g[p][s]): 1.0}
            expected = sum(w * tokens.patches[row, p] for p, w in shares.items()) / sum(shares.values())
            torch.testing.assert_close(selection.tokens[row, slot], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_tc_ssa_is_trained_to_use_all_slots_evenly():
    tokens, selector = tokens_of(), selector_of("tc-ssa")
    terms = selector.extra_terms(tokens, K)
    logits = [line[:K].tolist() for row in tokens.patches for line in selector.gate(row)]
    gates = [softmax(line) for line in logits]
    mean = [sum(gate[slot] for gate in gates) / len(gates) for slot in range(K)]
    routed = [sum(slot in sorted(range(K), key=lambda s, g=gate: -g[s])[:2] for gate in gates) / len(gates) for slot in range(K)]
    size = sum(math.log(sum(math.exp(value) for value in line)) for line in logits) / len(logits)
    assert float(terms["balance"]) == pytest.approx(0.1 * K * sum(p * f for p, f in zip(mean, routed)), rel=1e-4)
    assert float(terms["entropy"]) == pytest.approx(0.05 * (1 + sum(p * math.log(p) for p in mean) / math.log(K)), abs=1e-6)
    assert float(terms["logits"]) == pytest.approx(1e-5 * size**2, rel=1e-4)


def test_a_soft_merger_has_no_more_tokens_than_slots():
    with pytest.raises(CountError, match=r"'query-pool' has 8 slots, so it cannot give 9 tokens"):
        create_selector("query-pool", dim=32, slots=8).select(tokens_of(), 9)


def test_the_lesion_loss_of_a_soft_merger_is_the_attention_that_misses_the_lesion():
    attention = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    lesion = torch.tensor([[True, True, False], [False, False, True], [False, False, False]])
    expected = -(math.log(0.75) + math.log(0.8)) / 2
    assert float(lesion_mass_loss(attention, lesion, torch.tensor([True, True, True]))) == pytest.approx(expected)
    assert float(lesion_mass_loss(attention, lesion, torch.tensor([False, False, True]))) == 0


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


def test_cropr_ranks_by_its_query_and_learns_from_its_auxiliary_head_alone():
    tokens, selector = replace(tokens_of(), label=torch.tensor([0, 1, 1])), selector_of("cropr")
    scores, losses = selector.score(tokens), []
    for row in range(len(tokens)):
        logits = [float(selector.query[0] @ patch) for patch in tokens.patches[row]]
        assert scores[row].tolist() == pytest.approx(logits, abs=1e-5)
        shares = softmax([logit / math.sqrt(32) for logit in logits])
        gathered = sum(share * patch for share, patch in zip(shares, tokens.patches[row]))
        predicted = selector.auxiliary(gathered + selector.mlp(gathered))
        losses.append(-predicted.log_softmax(-1)[tokens.label[row]].item())
    step = selector.training_pass(tokens, 0.5, TrainConfig(), noise())
    assert not step.pooled.requires_grad
    assert step.terms["auxiliary"].requires_grad
    assert step.terms["auxiliary"].item() == pytest.approx(sum(losses) / 3, abs=1e-5)
    assert step.weights["auxiliary"] == 1.0
    lesion_first = Method("cropr", variant="lesion-first").config(TrainConfig())
    assert "auxiliary" not in selector.training_pass(tokens, 0.5, lesion_first, noise(), route=False).terms
    with pytest.raises(MissingSignalError, match="class labels"):
        selector.training_pass(replace(tokens, label=None), 0.5, TrainConfig(), noise())


def test_soft_top_k_sums_to_k_and_has_the_gradient_of_its_threshold():
    scores = torch.randn(2, 12, generator=noise(), dtype=torch.float64).requires_grad_()
    gates = soft_topk(scores, 5, 0.5)
    torch.testing.assert_close(gates.sum(1), torch.full((2,), 5.0, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.autograd.gradcheck(lambda s: soft_topk(s, 5, 0.5), (scores,), atol=1e-4)
    # A shift of all scores changes nothing.
    torch.testing.assert_close(soft_topk(scores + 3, 5, 0.5), gates, atol=1e-6, rtol=0)
    assert soft_topk(scores, 12, 0.5).eq(1).all()


def test_the_noise_gate_preserves_the_variance_of_a_closed_patch():
    patches = torch.randn(1, 4000, 3, generator=noise()) * torch.tensor([1.0, 2.0, 5.0]) + 7
    for openness in (1e-6, 0.5, 1.0):
        gated = noise_gate(patches, torch.full((1, 4000), openness), noise(2))
        torch.testing.assert_close(gated.std(1), patches.std(1), atol=0.15, rtol=0.05)
        torch.testing.assert_close(gated.mean(1), patches.mean(1), atol=0.2, rtol=0)
    torch.testing.assert_close(noise_gate(patches, torch.ones(1, 4000), noise()), patches, atol=0.03, rtol=0)


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


def test_variants_that_change_a_part_of_lats_belong_to_lats():
    assert str(Method.parse("dynamicvit:mask-free")) == "dynamicvit:mask-free"
    Method.parse("lats:lesion-first-raster")
    with pytest.raises(UnknownNameError, match="variant of dynamicvit"):
        Method.parse("dynamicvit:lesion-first-raster")


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


def test_grad_cam_at_norm1_differs_from_gradient_times_token_there():
    selector = selector_of("gradcam-norm1")
    patches = tokens_of().patches[0]
    logits, u, _ = probe_by_hand(selector, patches)
    (gradient,) = torch.autograd.grad(logits.max(), u)
    grad_cam, times_token = (u * gradient.mean(0)).sum(1), (u * gradient).sum(1)
    assert grad_cam.argsort().tolist() != times_token.argsort().tolist()


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


def test_the_heads_of_a_probe_share_its_width():
    with pytest.raises(RequestError, match="multiple of heads"):
        create_selector("relevance", dim=32, heads=3, width=128)


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


@pytest.mark.parametrize("name", ["grad-token", "gradcam-norm1", "relevance", "abmil-attention"])
def test_a_probe_learns_from_labels_and_not_through_the_selection(name):
    tokens, selector = replace(tokens_of(), label=torch.tensor([0, 1, -1])), selector_of(name)
    step = selector.training_pass(tokens, 0.5, TrainConfig(), noise())
    assert not step.pooled.requires_grad
    logits = selector.attribute(tokens.patches)[1]
    expected = torch.nn.functional.cross_entropy(logits[:2], tokens.label[:2])
    torch.testing.assert_close(step.terms["probe"], expected)
    with pytest.raises(MissingSignalError, match="class labels"):
        selector.training_pass(replace(tokens, label=None), 0.5, TrainConfig(), noise())
