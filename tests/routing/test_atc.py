"""ATC against the agglomeration of clusters as a plain loop."""

from __future__ import annotations

import pytest
import torch

from medtokenbudget.errors import UnknownNameError
from medtokenbudget.routing import create_selector
from tests.routing.batches import clustered, cosine, each, mean, same_groups

N, K = 20, 7


@pytest.mark.parametrize("linkage", ["average", "complete", "single"])
def test_atc_merges_the_closest_pair_of_clusters_until_k_are_left(linkage):
    tokens = clustered()
    selection = create_selector("atc", linkage=linkage).select(tokens, K)
    reduce = {"average": lambda d: sum(d) / len(d), "complete": max, "single": min}[linkage]
    for row, x, _ in each(tokens):
        clusters = [{i} for i in range(N)]
        while len(clusters) > K:
            pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
            distance = {(a, b): reduce([1 - cosine(x[i], x[j]) for i in clusters[a] for j in clusters[b]]) for a, b in pairs}
            a, b = min(pairs, key=distance.__getitem__)
            clusters[b] |= clusters.pop(a)
        assert same_groups(selection.assignment[row], clusters)
        for group in clusters:
            token = selection.tokens[row, selection.assignment[row, min(group)]]
            torch.testing.assert_close(token, mean([x[i] for i in group]), atol=1e-5, rtol=1e-5)
    with pytest.raises(UnknownNameError, match="linkage"):
        create_selector("atc", linkage="ward")
