"""EViT against its formula as a plain loop."""

from __future__ import annotations

from dataclasses import replace

import torch

from medtokenbudget.routing import create_selector
from tests.routing.batches import clustered, each, mean, ranked

N, K = 20, 7


def test_evit_keeps_the_most_attended_patches_and_fuses_the_others_by_attention():
    tokens = clustered()
    selection = create_selector("evit").select(tokens, K)
    for row, x, attention in each(tokens):
        order = ranked(attention)
        expected = [x[i] for i in order[: K - 1]]
        expected.append(mean([x[i] for i in order[K - 1 :]], [attention[i] for i in order[K - 1 :]]))
        torch.testing.assert_close(selection.tokens[row], torch.stack(expected))
        assert selection.weights[row].tolist() == [1.0] * (K - 1) + [N - K + 1]


def test_one_token_is_the_attention_pooled_image_all_tokens_change_nothing_and_no_attention_is_a_plain_mean():
    tokens = clustered()
    one = create_selector("evit").select(tokens, 1).tokens[:, 0]
    attention = tokens.cls_attention / tokens.cls_attention.sum(1, keepdim=True)
    torch.testing.assert_close(one, torch.einsum("bn,bnd->bd", attention, tokens.patches))
    whole = create_selector("evit").select(tokens, N)
    torch.testing.assert_close(
        whole.tokens, torch.take_along_dim(tokens.patches, tokens.cls_attention.argsort(1, descending=True).unsqueeze(-1), 1)
    )
    blind = replace(tokens, cls_attention=torch.zeros(2, N))
    torch.testing.assert_close(create_selector("evit").select(blind, K).tokens[:, -1], tokens.patches[:, K - 1 :].mean(1))
