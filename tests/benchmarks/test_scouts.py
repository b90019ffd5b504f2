"""The benchmark of scouts: its harder crops and its Dice."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from benchmarks.scouts import dice, harder


def test_a_harder_crop_shows_the_lesion_far_from_its_middle_or_does_not_exist() -> None:
    lesion = np.zeros((100, 140), np.uint8)
    lesion[40:56, 60:76] = 255
    left, top, right, bottom = harder(Image.fromarray(lesion), 0) or (0, 0, 0, 0)
    assert right - left == bottom - top == 70
    rows, columns = np.nonzero(lesion[top:bottom, left:right])
    assert len(rows) >= 0.9 * 256
    assert np.hypot((rows.mean() + 0.5) / 70 - 0.5, (columns.mean() + 0.5) / 70 - 0.5) >= 0.25
    assert harder(Image.fromarray(np.full((100, 140), 255, np.uint8)), 0) is None
    assert harder(Image.fromarray(np.zeros((100, 140), np.uint8)), 0) is None


def test_dice_is_twice_the_common_pixels_over_all() -> None:
    mask = np.zeros((4, 4), np.uint8)
    mask[:2] = 255
    found = np.zeros((4, 4))
    found[:3, :2] = 0.9
    assert dice(found, Image.fromarray(mask)) == pytest.approx(2 * 4 / (8 + 6))
