"""TransMIL: its attention, its positions, and the whole."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from medtokenbudget.tokens import TokenSet
from tests.heads.kept import head_of, kept_of
from tests.routing.batches import seeded, tokens_of


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
