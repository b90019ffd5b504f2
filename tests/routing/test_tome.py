"""ToMe against a loop over images and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medtokenbudget.routing import TokenBatch, create_selector
from tests.routing.batches import tokens_of


def tome_by_hand(image: list[list[float]], k: int) -> list[tuple[list[float], list[int]]]:
    """Tokens of one image as (mean, members), by the published rule."""
    patches = [torch.tensor(p, dtype=torch.float64) for p in image]
    groups = [[i] for i in range(len(patches))]
    while len(groups) > k:
        means = [torch.stack([patches[i] for i in group]).mean(0) for group in groups]
        a, b = list(range(0, len(groups), 2)), list(range(1, len(groups), 2))
        best = []
        for i in a:
            similar = [float(torch.cosine_similarity(means[i], means[j], dim=0)) for j in b]
            best.append((max(similar), b[similar.index(max(similar))]))
        merging = sorted(range(len(a)), key=lambda i: (-best[i][0], i))[: min(len(groups) - k, len(groups) // 2)]
        merged = {j: list(groups[j]) for j in b}
        for i in merging:
            merged[best[i][1]] += groups[a[i]]
        groups = [groups[a[i]] for i in range(len(a)) if i not in merging] + [merged[j] for j in b]
    return [(torch.stack([patches[i] for i in group]).mean(0).tolist(), sorted(group)) for group in groups]


@pytest.mark.parametrize(("n", "k"), [(12, 12), (12, 11), (12, 6), (13, 3), (9, 1)])
def test_merging_equals_a_loop_over_images_and_tokens(n, k):
    patches = torch.randn(3, n, 6, generator=torch.Generator().manual_seed(n + k))
    selection = create_selector("tome").select(TokenBatch(patches, (1, n)), k)
    for row in range(3):
        expected = tome_by_hand(patches[row].tolist(), k)
        for place, (mean, members) in enumerate(expected):
            torch.testing.assert_close(selection.tokens[row, place], torch.tensor(mean), atol=1e-5, rtol=1e-5)
            assert (selection.assignment[row] == place).nonzero().flatten().tolist() == members
            assert selection.weights[row, place].item() == len(members)


@settings(max_examples=15, deadline=None)
@given(h=st.integers(1, 6), w=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
def test_mass_is_conserved_and_every_patch_goes_somewhere(h, w, seed, data):
    k = data.draw(st.integers(1, h * w))
    tokens = tokens_of(2, (h, w), 5, seed)
    selection = create_selector("tome").select(tokens, k)
    assert selection.kept is None
    assert bool((selection.assignment >= 0).all())
    assert selection.weights.sum(1).tolist() == [h * w, h * w]
    mass = (selection.tokens * selection.weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(mass / (h * w), tokens.patches.mean(1), atol=1e-5, rtol=1e-4)


def test_the_head_sees_the_plain_mean_of_the_merged_tokens():
    patches = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    selection = create_selector("tome").select(TokenBatch(patches, (2, 2)), 2)
    torch.testing.assert_close(selection.pooled(), torch.tensor([[0.5, 0.5]]))
    assert selection.weights.tolist() == [[3.0, 1.0]] or selection.weights.tolist() == [[1.0, 3.0]]
