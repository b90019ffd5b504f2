"""Views: image and mask move together, and an off-center crop is what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from medtokenbudget.backbone import views
from medtokenbudget.config import ExtractConfig
from medtokenbudget.errors import UnknownNameError

ASYMMETRIC = np.arange(6, dtype=np.uint8).reshape(2, 3)
"""0 1 2
   3 4 5"""
EXPECTED = {
    "identity": [[0, 1, 2], [3, 4, 5]],
    "hflip": [[2, 1, 0], [5, 4, 3]],
    "vflip": [[3, 4, 5], [0, 1, 2]],
    "rot180": [[5, 4, 3], [2, 1, 0]],
    "rot90": [[2, 5], [1, 4], [0, 3]],
    "rot270": [[3, 0], [4, 1], [5, 2]],
    "transpose": [[0, 3], [1, 4], [2, 5]],
    "transverse": [[5, 2], [4, 1], [3, 0]],
}


def blob(x: int, y: int, radius: int, size: tuple[int, int] = (200, 160)) -> Image.Image:
    width, height = size
    yy, xx = np.mgrid[:height, :width]
    return Image.fromarray((((xx - x) ** 2 + (yy - y) ** 2 <= radius**2) * 255).astype(np.uint8))


def view_of(image: Image.Image, mask: Image.Image | None, view: str, seed: int) -> tuple[Image.Image, Image.Image | None]:
    geometry = views.geometry_of(view, mask, seed)
    return geometry.of(image), None if mask is None else geometry.of(mask)


@pytest.mark.parametrize("view", EXPECTED)
def test_a_view_turns_image_and_mask_alike(view: str) -> None:
    image = Image.fromarray(np.repeat(ASYMMETRIC[:, :, None], 3, 2))
    seen, mask = view_of(image, Image.fromarray(ASYMMETRIC), view, seed=0)
    assert np.asarray(mask).tolist() == EXPECTED[view]
    assert np.asarray(seen)[:, :, 1].tolist() == EXPECTED[view]


def test_flips_are_for_training_images_and_off_center_crops_for_images_with_a_mask() -> None:
    assert views.views_of("flips", "train", has_mask=False) == ("identity", "hflip", "vflip", "rot180")
    assert views.views_of("flips", "val", has_mask=True) == ("identity",)
    assert views.views_of("off-center", "val", has_mask=True) == ("identity", "off-center")
    assert views.views_of("off-center", "train", has_mask=False) == ("identity",)
    assert views.views_of("off-center", "train", has_mask=True, crops=3)[1:] == ("off-center", "off-center-2", "off-center-3")
    assert views.views_of("off-center", "val", has_mask=True, crops=3) == ("identity", "off-center")
    with pytest.raises(UnknownNameError, match="dihedral"):
        ExtractConfig(views="diedral")


def test_augmented_views_turn_image_and_mask_alike_and_change_color_within_a_fifth() -> None:
    assert views.views_of("augmented", "train", has_mask=False, crops=2) == ("identity", "augmented", "augmented-2")
    assert views.views_of("augmented", "val", has_mask=True, crops=2) == ("identity",)
    gray = np.repeat(10 * ASYMMETRIC[:, :, None] + 80, 3, 2)
    turns, factors = set(), []
    for seed in range(60):
        geometry = views.geometry_of("augmented", None, seed)
        assert geometry == views.geometry_of("augmented", None, seed) != views.geometry_of("augmented-2", None, seed)
        assert views.Geometry.from_json(json.loads(json.dumps(geometry.to_json()))) == geometry
        mask, seen = geometry.of(Image.fromarray(ASYMMETRIC)), np.asarray(geometry.of(Image.fromarray(gray)))
        plain = np.asarray(views.Geometry(None, geometry.turn).of(Image.fromarray(ASYMMETRIC)))
        assert np.array_equal(np.asarray(mask), plain), "no color of a mask changes"
        assert np.corrcoef(seen[..., 0].ravel(), plain.ravel())[0, 1] > 0.99, "and the image is turned like its mask"
        turns.add(geometry.turn)
        factors.append(seen.mean() / gray.mean())
        assert geometry.color is not None
        assert factors[-1] == pytest.approx(geometry.color[0], abs=0.02), "contrast and saturation keep the mean of gray"
    assert turns == set(views.SETS["dihedral"])
    assert 0.79 < min(factors) < 0.85 < 1.15 < max(factors) < 1.21


@settings(deadline=None, max_examples=30)
@given(st.integers(60, 140), st.integers(50, 110), st.integers(3, 45), st.integers(0, 2**32))
def test_an_off_center_crop_keeps_most_of_the_lesion_and_moves_it(x: int, y: int, radius: int, seed: int) -> None:
    mask = blob(x, y, radius)
    image = Image.merge("RGB", [mask] * 3)
    seen, seen_mask = view_of(image, mask, "off-center", seed)
    assert np.array_equal(np.asarray(seen)[:, :, 0], np.asarray(seen_mask))
    assert 99 <= seen.width <= 151
    assert 79 <= seen.height <= 121
    inside = (np.asarray(seen_mask) > 127).sum() / (np.asarray(mask) > 127).sum()
    assert inside >= 0.6


def test_the_chosen_crop_is_the_farthest_of_sixty_by_a_plain_search() -> None:
    mask = np.asarray(blob(100, 80, 30)) > 127
    left, top, right, bottom = views.off_center_box(blob(100, 80, 30), seed=5)
    best = 0.0
    for w, h, x, y in np.random.default_rng(5).random((60, 4)):
        w, h = 0.5 + w / 4, 0.5 + h / 4
        box = np.array([(1 - w) * x * 200, (1 - h) * y * 160, ((1 - w) * x + w) * 200, ((1 - h) * y + h) * 160]).round().astype(int)
        ys, xs = np.nonzero(mask[box[1] : box[3], box[0] : box[2]])
        if len(xs) >= 0.6 * mask.sum():
            off = np.hypot((xs.mean() + 0.5) / (box[2] - box[0]) - 0.5, (ys.mean() + 0.5) / (box[3] - box[1]) - 0.5)
            if off > best:
                best, found = off, box
    assert [round(left * 200), round(top * 160), round(right * 200), round(bottom * 160)] == found.tolist()
    assert best > 0.2


def test_crops_depend_on_the_seed_and_the_image_alone() -> None:
    mask = blob(100, 80, 25)
    first = views.off_center_box(mask, views.image_seed(0, "a"))
    assert first == views.off_center_box(mask, views.image_seed(0, "a"))
    assert first != views.off_center_box(mask, views.image_seed(0, "b"))
    assert first != views.off_center_box(mask, views.image_seed(1, "a"))


def test_further_crops_are_other_crops_and_turned_with_their_masks() -> None:
    mask = blob(110, 70, 25)
    image = Image.merge("RGB", [mask] * 3)
    shapes = set()
    for number in range(2, 12):
        seen, seen_mask = view_of(image, mask, f"off-center-{number}", seed=1)
        assert np.array_equal(np.asarray(seen)[:, :, 0], np.asarray(seen_mask))
        assert (np.asarray(seen_mask) > 127).sum() >= 0.6 * (np.asarray(mask) > 127).sum()
        shapes.add(seen.size)
    assert len(shapes) > 5
    with pytest.raises(UnknownNameError, match="off-center"):
        view_of(image, mask, "off-center-two", seed=1)


def test_a_larger_mask_of_the_same_frame_is_cropped_to_the_same_place() -> None:
    image = Image.merge("RGB", [blob(100, 80, 25)] * 3)
    large = blob(300, 240, 75, (600, 480))
    seen, mask = view_of(image, large, "off-center", seed=3)
    small = np.asarray(mask.resize(seen.size)) > 127
    assert (small == (np.asarray(seen)[:, :, 0] > 127)).mean() > 0.98


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "needs a mask"),
        (Image.new("L", (50, 40), 0), "mask is empty"),
        (Image.new("L", (50, 40), 255), "fills too much"),
    ],
)
def test_an_off_center_view_that_cannot_be_had_says_why(mask: Image.Image | None, message: str) -> None:
    with pytest.raises(views.ViewError, match=message):
        view_of(Image.new("RGB", (50, 40)), mask, "off-center", 0)
