"""ABMIL, CLAM, TransMIL and the attentive probe against their formulas as plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from medtokenbudget.routing import create_selector
from medtokenbudget.tokens import TokenSet
from medtokenbudget.training import create_head
from tests.routing.batches import tokens_of


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head_of(name: str, classes: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_head(name, dim=32, classes=classes, **options).eval()


def kept_of(k: int = 20, batch: int = 3) -> TokenSet:
    tokens = tokens_of(batch)
    return TokenSet.of(create_selector("norm").select(tokens, k), tokens.grid)


def softmax(values: list[float]) -> list[float]:
    shares = [math.exp(value) for value in values]
    return [share / sum(shares) for share in shares]


@torch.no_grad()
@pytest.mark.parametrize("name", ["abmil", "clam-sb"])
def test_abmil_and_the_bag_of_clam_are_gated_attention_pooling(name):
    head, kept = head_of(name), kept_of()
    for row in range(3):
        features = [F.relu(head.features(x)) for x in kept.tokens[row]]
        attend = head.attend
        scores = [attend.output(torch.tanh(attend.value(h)) * torch.sigmoid(attend.gate(h))).item() for h in features]
        pooled = sum(share * h for share, h in zip(softmax(scores), features))
        torch.testing.assert_close(head(kept)[row], head.output(pooled), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_clam_mb_reads_one_attention_for_each_class():
    head, kept = head_of("clam-mb"), kept_of()
    for row in range(3):
        features = [F.relu(head.features(x)) for x in kept.tokens[row]]
        for number in range(3):
            shares = softmax([head.attend(h)[number].item() for h in features])
            pooled = sum(share * h for share, h in zip(shares, features))
            expected = (head.output.weight[number] @ pooled + head.output.bias[number]).item()
            assert head(kept)[row, number].item() == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["clam-sb", "clam-mb"])
def test_the_instance_loss_of_clam_takes_the_most_and_least_attended_tokens(name):
    head, kept, label = head_of(name, instances=4), kept_of(), torch.tensor([0, 2, -1])
    features = F.relu(head.features(kept.tokens))
    attention = head.attend(features)
    total = 0.0
    for number in range(3):
        losses = []
        for row in range(2):  # the third image has no label
            branch = number if name == "clam-mb" else 0
            order = sorted(range(20), key=lambda i, row=row, branch=branch: -attention[row, i, branch].item())
            own = int(label[row]) == number
            examples = [(i, int(own)) for i in order[:4]] + ([(i, 0) for i in order[-4:]] if own else [])
            each = [-head.instance[number](features[row, i]).log_softmax(-1)[target].item() for i, target in examples]
            losses.append(sum(each) / len(each))
        total += sum(losses) / len(losses) / 3
    logits, own_loss = head.training_step(kept, label)
    assert torch.equal(logits, head(kept))
    assert own_loss.item() == pytest.approx(0.3 / 0.7 * total, rel=1e-4)


@torch.no_grad()
def test_attentive_probe_is_attention_of_one_query():
    head, kept = head_of("attentive-probe"), kept_of()
    for row in range(3):
        x = head.norm(kept.tokens[row])
        keys, values = head.key(x).view(20, 4, 32), head.value(x).view(20, 4, 32)
        parts = []
        for part in range(4):
            shares = softmax([(keys[i, part] @ head.query[part]).item() / math.sqrt(32) for i in range(20)])
            parts.append(sum(share * values[i, part] for i, share in enumerate(shares)))
        torch.testing.assert_close(head(kept)[row], head.output(torch.cat(parts)), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_attention_of_transmil_is_exact():
    attention = head_of("transmil").first
    x = torch.randn(2, 6, 128, generator=seeded())
    q, k, v = attention.qkv(attention.norm(x)).view(2, 6, 3, 4, 32).permute(2, 0, 3, 1, 4)
    expected = attention.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 128))
    torch.testing.assert_close(attention(x, torch.ones(2, 6)), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_transmil_reads_the_class_token_after_attention_positions_and_attention():
    head, kept = head_of("transmil"), kept_of()
    for row in range(3):
        x = torch.stack([head.class_token[0, 0], *(F.relu(head.features(token)) for token in kept.tokens[row])])
        x = x + head.first(x[None], torch.ones(1, 21))[0]
        places = head.position(x[None, 1:], torch.ones(1, 20), kept.positions[row : row + 1], kept.grid)[0]
        x = torch.cat([x[:1], places])
        last = (x + head.second(x[None], torch.ones(1, 21))[0])[0]
        centered = last - last.mean()
        normed = centered / (centered.square().mean() + 1e-5).sqrt() * head.norm.weight + head.norm.bias
        expected = head.output.weight @ normed + head.output.bias
        torch.testing.assert_close(head(kept)[row], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_positions_of_transmil_are_those_of_the_grid():
    encoding = head_of("transmil").position
    tokens = tokens_of(2, (4, 5))
    x = torch.randn(2, 20, 128, generator=seeded())
    every = TokenSet.under(torch.ones(2, 20), tokens.patches, (4, 5))
    field = x.transpose(1, 2).view(2, 128, 4, 5)
    whole = x + sum(convolution(field) for convolution in encoding.convolutions).flatten(2).transpose(1, 2)
    torch.testing.assert_close(encoding(x, every.weights, every.positions, (4, 5)), whole, atol=1e-5, rtol=1e-4)
    # Some tokens in another order: the places that are left out are zero.
    chosen = torch.tensor([13, 2, 7])
    alone = encoding(x[:, chosen], torch.ones(2, 3), every.positions[:, chosen], (4, 5))
    field = torch.zeros_like(x)
    field[:, chosen] = x[:, chosen]
    field = field.transpose(1, 2).view(2, 128, 4, 5)
    expected = x + sum(convolution(field) for convolution in encoding.convolutions).flatten(2).transpose(1, 2)
    torch.testing.assert_close(alone, expected[:, chosen], atol=1e-5, rtol=1e-4)
