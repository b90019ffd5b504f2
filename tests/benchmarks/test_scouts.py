"""The benchmark of scouts: its harder crops and its Dice."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from benchmarks.scouts import dice, harder, table


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


def test_the_table_has_the_share_of_the_ceiling_and_the_interval_of_the_difference_to_center() -> None:
    draw = np.random.default_rng(0)
    lesion = draw.random((30, 100)) < 0.3
    scores = {"center": draw.random((30, 100)), "border-contrast": draw.random((30, 100)), "scout": lesion + draw.random((30, 100))}
    about = {"view": "original", "class": "NV", "lesion": list(lesion), "dice scout": 1}
    columns = {name: list(values) for name, values in scores.items()}
    found = table(pd.DataFrame({**about, "lesion id": [str(i // 2) for i in range(30)], **columns}), ["scout"])
    of_all = found[found["group"] == "all"].set_index("router")
    kept = [lesion[i, np.argsort(-scores["center"][i])[:30]].sum() for i in range(30)]
    assert of_all.loc["center", 0.3] == pytest.approx(100 * sum(kept) / np.minimum(lesion.sum(1), 30).sum())
    assert of_all.loc["scout", 0.3] == 100
    assert (of_all.loc["center", ["low 0.3", "high 0.3"]] == 0).all()
    gain = of_all.loc["scout", 0.3] - of_all.loc["center", 0.3]
    assert 0 < of_all.loc["scout", "low 0.3"] < gain < of_all.loc["scout", "high 0.3"]
    assert of_all.loc["border-contrast", "low 0.3"] < 0 < of_all.loc["border-contrast", "high 0.3"]
