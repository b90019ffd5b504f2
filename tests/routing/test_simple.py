"""Signals, references and controls: which patches come first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medtokenbudget.errors import MissingSignalError
from medtokenbudget.routing import TokenBatch, create_selector
from tests.routing.batches import clustered, seeded, tokens_of


def test_norm_keeps_the_longest_patches():
    patches = torch.tensor([[[1.0], [-5.0], [3.0], [0.0]]])
    assert create_selector("norm").order(TokenBatch(patches, (2, 2))).tolist() == [[1, 2, 0, 3]]


def test_local_contrast_keeps_the_patches_that_are_least_like_their_neighbors():
    # Directions in the plane: 0, 0, 90 and 0 degrees. Dissimilarities of neighbors: 0, 1, 1; their means: 0, 1/2, 1, 1.
    patches = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [1.0, 0.0]]])
    assert create_selector("local-contrast").order(TokenBatch(patches, (2, 2))).tolist() == [[2, 3, 1, 0]]


def test_signals_rank_by_their_field():
    tokens = tokens_of(1, (2, 3))
    for name, field, sign in (
        ("attention-entropy", "attention_entropy", -1),
        ("class-attention", "cls_attention", -1),
        ("rollout", "rollout", -1),
        ("darkness", "luminance", 1),
    ):
        values = getattr(tokens, field)[0].tolist()
        assert create_selector(name).order(tokens)[0].tolist() == sorted(range(6), key=lambda i, v=values, s=sign: s * v[i])


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (2, 7), (1, 6)])
def test_center_ranks_by_distance_to_the_middle_of_the_grid(grid):
    h, w = grid
    distance = [((i // w + 0.5 - h / 2) ** 2 + (i % w + 0.5 - w / 2) ** 2, i) for i in range(h * w)]
    order = create_selector("center").order(tokens_of(2, grid))
    assert order.tolist() == [[i for _, i in sorted(distance)]] * 2


def test_oracle_keeps_lesion_patches_first_and_refuses_images_without_masks():
    tokens = tokens_of()
    order = create_selector("oracle").order(tokens)
    for row, places in enumerate(order.tolist()):
        lesion = tokens.lesion[row].nonzero().flatten().tolist()
        assert places[: len(lesion)] == lesion
    with pytest.raises(MissingSignalError, match="1 of 3"):
        create_selector("oracle").select(replace(tokens, has_mask=torch.tensor([True, False, True])), 9)


def test_random_is_uniform_over_the_patches_and_repeatable_without_a_generator():
    tokens = tokens_of(2000, (2, 5), 1)
    kept = create_selector("random").select(tokens, 3, seeded()).kept.float().mean(0)
    torch.testing.assert_close(kept, torch.full((10,), 0.3), atol=0.04, rtol=0)
    assert torch.equal(create_selector("random", seed=4).order(tokens), create_selector("random", seed=4).order(tokens))
    assert not torch.equal(create_selector("random", seed=4).order(tokens), create_selector("random", seed=5).order(tokens))
    drawn, generator = create_selector("random").select(tokens, 3).kept, seeded()
    first, second = (create_selector("random").select(tokens, 3, generator).kept for _ in range(2))
    assert not torch.equal(first, second), "draws go on in the generator that was given"
    assert not torch.equal(first, drawn)


def test_no_pruning_keeps_all_at_every_budget():
    tokens = tokens_of()
    selection = create_selector("no-pruning").select(tokens, 3)
    assert torch.equal(selection.tokens, tokens.patches)
    torch.testing.assert_close(create_selector("no-pruning").pooled(tokens, [0.1, 1.0])[:, 0], tokens.patches.mean(1))


def test_box_prior_ranks_by_the_distance_to_the_lesions_box():
    lesion = torch.zeros(2, 20, dtype=torch.bool)
    lesion[0, [6, 12]] = True  # rows 1 and 2, columns 1 and 2 of a 4 x 5 grid
    tokens = replace(clustered(), lesion=lesion)
    order = create_selector("box-prior").order(tokens)

    def distance(i: int, top: int, bottom: int, left: int, right: int) -> float:
        y, x = divmod(i, 5)
        return max(abs(y - (top + bottom) / 2) / (bottom - top + 1), abs(x - (left + right) / 2) / (right - left + 1))

    assert order[0].tolist() == sorted(range(20), key=lambda i: (distance(i, 1, 2, 1, 2), i))
    assert set(order[0, :4].tolist()) == {6, 7, 11, 12}
    # No lesion patch: the box is the image.
    assert order[1].tolist() == sorted(range(20), key=lambda i: (distance(i, 0, 3, 0, 4), i))
    with pytest.raises(MissingSignalError, match="1 of 2"):
        create_selector("box-prior").select(replace(tokens, has_mask=torch.tensor([True, False])), 7)


@pytest.mark.parametrize("grid", [(5, 6), (1, 7)])
def test_border_contrast_ranks_by_the_distance_to_the_most_similar_third_of_the_border(grid):
    (h, w), tokens = grid, tokens_of(2, grid, 4)
    border = [i for i in range(h * w) if i // w in (0, h - 1) or i % w in (0, w - 1)]
    for row in range(2):
        patches = tokens.patches[row].double()
        raw = []
        for patch in patches:
            similar = sorted((float(patch @ patches[i] / (patch.norm() * patches[i].norm())) for i in border), reverse=True)
            raw.append(1 - sum(similar[: len(border) // 3]) / (len(border) // 3))
        near = [[j for j in range(h * w) if abs(j // w - i // w) <= 1 and abs(j % w - i % w) <= 1] for i in range(h * w)]
        smooth = [sum(raw[j] for j in places) / len(places) for places in near]
        found = create_selector("border-contrast").score(tokens)[row]
        torch.testing.assert_close(found, torch.tensor(smooth), atol=1e-5, rtol=1e-5)
