"""K-medoids against the alternation of its two steps."""

from __future__ import annotations

import pytest
import torch

from medtokenbudget.errors import RequestError
from medtokenbudget.routing import create_selector
from tests.routing.batches import clustered, each, ranked, same_groups

N, K = 20, 7


def test_k_medoids_alternates_assignment_and_medoids():
    tokens = clustered()
    selection = create_selector("k-medoids", iterations=3).select(tokens, K)
    for row, x, attention in each(tokens):
        squared = [[float((a - b).square().sum()) for b in x] for a in x]

        def assigned(medoids: list[int], squared=squared) -> list[list[int]]:
            groups: list[list[int]] = [[] for _ in medoids]
            for i in range(N):
                nearest = [squared[i][medoid] for medoid in medoids]
                groups[nearest.index(min(nearest))].append(i)
            return groups

        medoids = ranked(attention)[:K]
        for _ in range(3):
            groups = assigned(medoids)
            medoids = [min(g, key=lambda i, g=g, s=squared, a=attention: sum(a[j] * s[i][j] for j in g)) for g in groups]
        assert torch.equal(selection.tokens[row], tokens.patches[row, medoids])
        assert same_groups(selection.assignment[row], [set(g) for g in assigned(medoids)])
    with pytest.raises(RequestError, match="`iterations` must be at least 1, got 0"):
        create_selector("k-medoids", iterations=0)
