"""TokenLearner against its formula as a plain loop."""

from __future__ import annotations

import torch

from tests.routing.batches import selector_of, softmax, tokens_of

N, K = 35, 9


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
