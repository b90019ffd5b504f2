"""DPC-KNN against its formula as a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from medtokenbudget.errors import RequestError
from medtokenbudget.routing import TokenBatch, create_selector
from tests.routing.batches import clustered, each, mean, ranked

N, K = 20, 7


def test_dpc_knn_takes_density_peaks_as_centers():
    tokens, neighbors = clustered(), 5
    selection = create_selector("dpc-knn").select(tokens, K)
    for row, x, _ in each(tokens):
        squared = [[float((a - b).square().sum()) / len(a) for b in x] for a in x]
        density = [math.exp(-sum(sorted(squared[i])[1 : neighbors + 1]) / neighbors) for i in range(N)]
        peaks = []
        for i in range(N):
            denser = [math.sqrt(squared[i][j]) for j in range(N) if density[j] > density[i]]
            peaks.append(density[i] * (min(denser) if denser else math.sqrt(max(squared[i]))))
        centers = ranked(peaks)[:K]
        groups: dict[int, set[int]] = {c: set() for c in centers}
        for i in range(N):
            groups[min(centers, key=lambda c, i=i, s=squared: s[i][c])].add(i)
        for place, center in enumerate(centers):
            expected = mean([x[i] for i in groups[center]])
            torch.testing.assert_close(selection.tokens[row, place], expected, atol=1e-5, rtol=1e-5)


def test_dpc_knn_gives_k_groups_of_identical_patches():
    selection = create_selector("dpc-knn").select(TokenBatch(torch.ones(1, 20, 4), (4, 5)), 6)
    assert sorted(selection.weights[0].tolist()) == [1, 1, 1, 1, 1, 15]
    torch.testing.assert_close(selection.tokens, torch.ones(1, 6, 4))
    with pytest.raises(RequestError, match="`neighbors` must be at least 1, got 0"):
        create_selector("dpc-knn", neighbors=0)
