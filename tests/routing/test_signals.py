"""The signals against plain loops over small tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medtokenbudget.backbone.attention import cosine_attention, normalized_entropy, pseudo_signals
from medtokenbudget.errors import GridError, RequestError, ShapeError, UnknownNameError
from medtokenbudget.routing import feature_norm, local_contrast


def entropy_by_hand(weights: Tensor) -> list[list[float]]:
    rows = []
    for image in weights.tolist():
        n = len(image)
        rows.append([1 + sum(a * math.log(a) for a in row if a > 0) / math.log(n) for row in image])
    return rows


def dissimilarity(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b))
    return 1 - dot / (math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b)))


def contrast_by_hand(image: list[list[float]], grid: tuple[int, int], neighborhood: str) -> list[float]:
    h, w = grid
    values = []
    for i in range(h * w):
        row, column = divmod(i, w)
        if neighborhood == "raster":
            near = [j for j in (i - 1, i + 1) if 0 <= j < h * w]
        else:
            steps = [(-1, 0), (1, 0), (0, -1), (0, 1)]
            if neighborhood == "grid8":
                steps += [(-1, -1), (-1, 1), (1, -1), (1, 1)]
            near = [(row + r) * w + column + c for r, c in steps if 0 <= row + r < h and 0 <= column + c < w]
        values.append(sum(dissimilarity(image[i], image[j]) for j in near) / len(near) if near else 0.0)
    return values


def test_entropy_equals_the_formula_also_where_rows_do_not_sum_to_one():
    attention = torch.softmax(torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)), -1) * 0.9
    torch.testing.assert_close(normalized_entropy(attention), torch.tensor(entropy_by_hand(attention)))
    torch.testing.assert_close(normalized_entropy(torch.full((1, 4, 4), 0.25)), torch.zeros(1, 4))
    torch.testing.assert_close(normalized_entropy(torch.eye(4).unsqueeze(0)), torch.ones(1, 4))
    with pytest.raises(RequestError, match="at least two patches"):
        normalized_entropy(torch.ones(1, 1, 1))


def test_norm_is_divided_by_the_largest_of_the_image():
    patches = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[0.0, 0.0], [6.0, 8.0]]])
    torch.testing.assert_close(feature_norm(patches), torch.tensor([[1.0, 0.2], [0.0, 1.0]]))
    assert feature_norm(torch.zeros(1, 3, 2)).tolist() == [[0.0, 0.0, 0.0]]
    # The squares of these overflow in half precision.
    patches = torch.full((1, 2, 64), 3e4, dtype=torch.float16)
    assert feature_norm(patches).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("neighborhood", ["raster", "grid4", "grid8"])
@pytest.mark.parametrize("grid", [(3, 4), (1, 5), (4, 1), (2, 2), (1, 1)])
def test_contrast_equals_a_loop_over_the_neighbors(neighborhood, grid):
    patches = torch.randn(2, grid[0] * grid[1], 5, generator=torch.Generator().manual_seed(1))
    expected = torch.tensor([contrast_by_hand(image, grid, neighborhood) for image in patches.tolist()])
    torch.testing.assert_close(local_contrast(patches, grid, neighborhood), expected, atol=1e-6, rtol=1e-5)


@settings(max_examples=10, deadline=None)
@given(h=st.integers(1, 5), w=st.integers(1, 5), scale=st.floats(0.01, 100), seed=st.integers(0, 99))
def test_contrast_does_not_depend_on_the_length_of_the_patches(h, w, scale, seed):
    patches = torch.randn(1, h * w, 4, generator=torch.Generator().manual_seed(seed))
    for neighborhood in ("raster", "grid4", "grid8"):
        contrast = local_contrast(patches, (h, w), neighborhood)
        assert bool(((contrast >= -1e-5) & (contrast <= 2 + 1e-5)).all())
        torch.testing.assert_close(local_contrast(patches * scale, (h, w), neighborhood), contrast, atol=1e-5, rtol=1e-4)


def test_contrast_refuses_a_wrong_grid_and_an_unknown_neighborhood():
    with pytest.raises(GridError, match="does not have 6 patches"):
        local_contrast(torch.ones(1, 6, 2), (2, 2))
    with pytest.raises(UnknownNameError, match="grid8"):
        local_contrast(torch.ones(1, 6, 2), (2, 3), "grid9")
    with pytest.raises(ShapeError):
        local_contrast(torch.ones(6, 2), (2, 3))


def test_pseudo_attention_is_the_same_for_selectors_and_for_stores_and_equals_a_plain_loop():
    generator = torch.Generator().manual_seed(0)
    patches, cls = torch.randn(2, 9, 5, generator=generator), torch.randn(2, 5, generator=generator)
    stored = pseudo_signals(patches, cls, ("attention_entropy", "received_attention", "cls_attention"))
    weights = cosine_attention(patches, patches)

    def row(query, keys):
        """softmax(cos / 0.1) of one query, as the authors of the paper have it."""
        cosines = [sum(a * b for a, b in zip(query, key)) / (math.hypot(*query) * math.hypot(*key)) for key in keys]
        powers = [math.exp(cosine / 0.1) for cosine in cosines]
        return [power / sum(powers) for power in powers]

    for b, image in enumerate(patches.tolist()):
        loop = [row(patch, image) for patch in image]
        torch.testing.assert_close(weights[b], torch.tensor(loop), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stored["cls_attention"][b], torch.tensor(row(cls[b].tolist(), image)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(stored["attention_entropy"], normalized_entropy(weights))
    torch.testing.assert_close(stored["received_attention"], weights.mean(1))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9))
