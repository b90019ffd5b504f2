"""Masks to patch labels, by the supplement's rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from medtokenbudget.data import DecodeError, patch_labels, prevalence_table
from medtokenbudget.errors import GridError
from tests.data.pictures import disc_mask
from tests.small_model import small_model


def test_a_patch_is_lesion_when_more_than_half_of_it_is() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[:32, :16] = 255
    labels = patch_labels(Image.fromarray(mask), (4, 4))
    assert labels.dtype == bool
    assert labels.reshape(4, 4).tolist() == [[True, False, False, False]] * 2 + [[False] * 4] * 2
    # In raster order, also on a grid that is not square.
    mask = np.zeros((20, 60), np.uint8)
    mask[10:, 40:] = 255
    assert np.flatnonzero(patch_labels(Image.fromarray(mask), (2, 3))).tolist() == [5]


def test_a_mask_of_zeros_and_ones_is_rejected_and_not_read_as_empty(tmp_path: Path) -> None:
    ones = Image.fromarray((np.asarray(disc_mask()) > 0).astype(np.uint8))
    message = "The mask has only the values 0 and 1, so no pixel counts as lesion. Multiply its values by 255."
    with pytest.raises(DecodeError, match=message) as caught:
        patch_labels(ones, (16, 16))
    assert caught.value.kind == "mask-values"
    model = small_model(tmp_path, baselines=())
    with pytest.raises(DecodeError, match=message):
        model.encode(torch.zeros(1, 160, 160, 3, dtype=torch.uint8), [ones])
    with pytest.raises(GridError, match="at least one row"):
        patch_labels(disc_mask(), (0, 16))


@pytest.mark.parametrize(
    ("mask", "lesion"),
    [
        (Image.new("L", (50, 40)), False),
        (disc_mask(200, 200, radius=3), False),
        (Image.new("L", (50, 40), 3), False),  # JPEG leaves such pixels around a lesion; a crop may show nothing else
        (Image.new("L", (50, 40), 127), False),
        (Image.new("L", (50, 40), 128), True),
    ],
)
def test_a_patch_is_lesion_above_half_of_the_gray_levels(mask: Image.Image, lesion: bool) -> None:
    assert patch_labels(mask, (16, 16), whole=False).tolist() == [lesion] * 256


def test_labels_equal_a_plain_triangle_filter_not_the_mean_over_the_patch() -> None:
    # Pillow's bilinear reduction is a triangle of twice the scale around each patch center: written out as a matrix here.
    def shares(values: np.ndarray, reach: float) -> np.ndarray:
        def weights(length: int, cells: int) -> np.ndarray:
            scale = length / cells
            distance = abs(np.arange(length)[None] + 0.5 - (np.arange(cells)[:, None] + 0.5) * scale) / scale
            matrix = np.maximum(0, 1 - distance) if reach == 1 else (distance < reach).astype(float)
            return matrix / matrix.sum(1, keepdims=True)

        return weights(48, 6) @ values @ weights(80, 8).T

    told_apart = 0
    for radius in range(8, 23):
        mask = disc_mask(80, 48, radius=radius)
        values = np.asarray(mask, np.float64) / 255
        triangle, box = shares(values, 1), shares(values, 0.5)
        clear = abs(triangle - 0.5) > 0.01
        labels = patch_labels(mask, (6, 8)).reshape(6, 8)
        np.testing.assert_array_equal(labels[clear], (triangle > 0.5)[clear])
        told_apart += int(((box > 0.5) != (triangle > 0.5))[clear].sum())
    assert told_apart, "some patch of these masks is lesion by one filter alone"


def test_the_prevalence_table_leaves_out_images_without_a_lesion_patch() -> None:
    table = prevalence_table([0, 6, 10, 20, 248], 256)
    assert table["minimum"] == {"patches": 6.0, "prevalence": 6 / 256}
    assert table["median"]["patches"] == 15.0
    assert table["mean"]["patches"] == 71.0
    squares = (6 - 71) ** 2 + (10 - 71) ** 2 + (20 - 71) ** 2 + (248 - 71) ** 2
    assert table["standard deviation"]["patches"] == pytest.approx((squares / 4) ** 0.5)
    assert prevalence_table([0, 0], 256) == {}
