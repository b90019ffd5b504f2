"""Query pooling against its formula as a plain loop."""

from __future__ import annotations

import torch

from tests.routing.batches import selector_of, softmax, tokens_of

N, K = 35, 9


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
