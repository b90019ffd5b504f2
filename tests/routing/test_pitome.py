"""PiToMe against its energy as a plain loop."""

from __future__ import annotations

import math

import torch

from medtokenbudget.routing import TokenBatch, create_selector
from tests.routing.batches import clustered, cosine, each, mean, ranked, same_groups

N, K = 20, 7


def test_pitome_merges_among_the_patches_of_highest_energy():
    tokens, margin, r = clustered(), 0.45, 6
    selection = create_selector("pitome").select(tokens, N - r)
    for row, x, _ in each(tokens):
        energies = []
        for i in range(N):
            similar = [cosine(x[i], x[j]) for j in range(N) if j != i]
            energies.append(sum(s if s >= margin else math.exp(s - margin) - 1 for s in similar) / (N - 1))
        order = ranked(energies)
        sources, targets = order[: 2 * r : 2], order[1 : 2 * r : 2]
        groups = {i: {i} for i in range(N) if i not in sources}
        for i in sources:
            groups[max(targets, key=lambda j, i=i, x=x: cosine(x[i], x[j]))].add(i)
        assert same_groups(selection.assignment[row], list(groups.values()))
        for group, token in zip((sorted(groups)), selection.tokens[row]):
            torch.testing.assert_close(token, mean([x[i] for i in groups[group]]), atol=1e-5, rtol=1e-5)


def test_pitome_protects_an_isolated_patch_that_tome_may_merge():
    patches = torch.cat([torch.eye(8)[:1].repeat(9, 1), torch.eye(8)[5:6]])[None]
    selection = create_selector("pitome").select(TokenBatch(patches, (2, 5)), 5)
    lonely = selection.assignment[0, 9]
    assert selection.weights[0, lonely] == 1
