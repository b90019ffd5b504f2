"""Frequency-aware reduction against the high-pass attention of the paper."""

from __future__ import annotations

from dataclasses import replace

import torch

from medtokenbudget.routing import create_selector
from tests.routing.batches import clustered, each, mean, ranked, seeded

N, K = 20, 7


def test_frequency_keeps_the_patches_of_the_high_pass_attention_and_a_dc_token():
    attention = torch.rand(2, N, N, generator=seeded(5)).mul(4).softmax(-1)
    tokens = replace(clustered(), received_attention=attention.mean(1))
    selection = create_selector("frequency").select(tokens, K)
    for row, x, _ in each(tokens):
        high_pass = [sum(float(attention[row, i, j]) - 1 / N for i in range(N)) for j in range(N)]
        order = ranked(high_pass)
        expected = [x[i] for i in order[: K - 1]] + [mean([x[i] for i in order[K - 1 :]])]
        torch.testing.assert_close(selection.tokens[row], torch.stack(expected))
