"""What happens to an image before the backbone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from medtokenbudget.backbone.backbone import Preprocessing, luminance
from medtokenbudget.errors import GridError


def test_the_whole_image_is_resized_and_nothing_is_cropped() -> None:
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:, :2] = picture[:, -2:] = 255
    prepared = Preprocessing(40, (0.5,) * 3, (0.5,) * 3).prepare(Image.fromarray(picture))
    assert prepared.shape == (40, 40, 3)
    assert prepared[:, 0].min() > 200
    assert prepared[:, -1].min() > 200
    assert prepared[:, 10:30].max() == 0


def test_normalizing_subtracts_the_mean_and_divides_by_the_deviation() -> None:
    preprocessing = Preprocessing(2, (0.1, 0.2, 0.3), (0.5, 0.25, 0.125))
    pixels = torch.arange(12, dtype=torch.uint8).reshape(1, 2, 2, 3)
    normalized = preprocessing.normalize(pixels)
    assert normalized.shape == (1, 3, 2, 2)
    assert float(normalized[0, 2, 1, 0]) == pytest.approx((8 / 255 - 0.3) / 0.125, abs=1e-5)
    assert preprocessing.to_dict()["std"] == [0.5, 0.25, 0.125]


def test_luminance_is_the_mean_grey_value_of_each_patch() -> None:
    pixels = torch.zeros(1, 4, 4, 3, dtype=torch.uint8)
    pixels[0, :2, 2:] = torch.tensor([255, 0, 0], dtype=torch.uint8)
    pixels[0, 2:, :2] = torch.tensor([10, 20, 30], dtype=torch.uint8)
    pixels[0, 3, 3] = 255
    gray = (0.299 * 10 + 0.587 * 20 + 0.114 * 30) / 255
    torch.testing.assert_close(luminance(pixels, (2, 2)), torch.tensor([[0.0, 0.299, gray, 0.25]]))
    with pytest.raises(GridError, match="cannot be divided"):
        luminance(pixels, (3, 3))
