"""TPS against its formula as a plain loop."""

from __future__ import annotations

import math

import torch

from medtokenbudget.routing import create_selector
from tests.routing.batches import clustered, cosine, each, mean, ranked

N, K = 20, 7


def test_tps_squeezes_pruned_patches_into_their_most_similar_host():
    tokens = clustered()
    selection = create_selector("tps").select(tokens, K)
    for row, x, attention in each(tokens):
        order = ranked(attention)
        kept, pruned = order[:K], order[K:]
        host = {i: max(kept, key=lambda j, i=i, x=x: cosine(x[i], x[j])) for i in pruned}
        for place, j in enumerate(kept):
            guests = [i for i in pruned if host[i] == j]
            weights = [math.e] + [math.exp(cosine(x[i], x[j])) for i in guests]
            expected = mean([x[j], *(x[i] for i in guests)], weights)
            torch.testing.assert_close(selection.tokens[row, place], expected, atol=1e-5, rtol=1e-5)
            assert selection.weights[row, place] == 1 + len(guests)
