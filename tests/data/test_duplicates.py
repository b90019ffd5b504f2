"""Duplicates: the same picture is found through what really happens to pictures, another picture is not."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from medtokenbudget.data import Manifest, merged_groups
from medtokenbudget.data.duplicates import Fingerprint, _close_hashes, exact_pairs, fingerprint, merge, near_pairs
from tests.data.pictures import lesion_picture, save


def compressed(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=15)
    return stream.getvalue()


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2)),
    "another shape": lambda image: image.resize((200, 200)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.6),
    "gray": lambda image: image.convert("L").convert("RGB"),
    "strongly compressed": lambda image: Image.open(io.BytesIO(compressed(image))).convert("RGB"),
}


def prints(folder: Path, *images: Image.Image) -> dict[int, Fingerprint]:
    return {k: fingerprint(save(image, folder / f"{k}.png"), image) for k, image in enumerate(images)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_found(tmp_path: Path, change: str) -> None:
    images = [lesion_picture(k, 192, 144) for k in range(5)]
    assert near_pairs(prints(tmp_path, *images, CHANGES[change](images[3]))) == [(3, 5)]


def test_different_lesions_under_the_same_dark_rim_are_not_duplicates(tmp_path: Path) -> None:
    y, x = np.mgrid[-1:1:128j, -1:1:128j]
    rim = np.where(x**2 + y**2 < 0.9, 200.0, 10.0)
    pictures = []
    for cx, cy in ((-0.1, 0.0), (0.12, 0.05)):
        picture = np.where((x - cx) ** 2 + (y - cy) ** 2 < 0.03, 150.0, rim)
        pictures.append(Image.fromarray(np.repeat(picture[..., None], 3, 2).astype(np.uint8)))
    one, other = prints(tmp_path, *pictures).values()
    whole = np.corrcoef(one.thumbnail.reshape(-1), other.thumbnail.reshape(-1))[0, 1]
    assert whole > 0.97
    other = replace(other, phash=one.phash)  # so that the thumbnails decide
    assert near_pairs({0: one, 1: other}) == []


def test_the_same_middle_in_other_surroundings_is_not_a_duplicate() -> None:
    rng = np.random.default_rng(0)
    thumbnails = rng.integers(0, 256, (2, 32, 32)).astype(np.uint8)
    thumbnails[1, 4:28, 4:28] = thumbnails[0, 4:28, 4:28]
    assert near_pairs({k: Fingerprint(str(k), 0, thumbnail) for k, thumbnail in enumerate(thumbnails)}) == []


def test_the_same_bytes_are_exact_and_not_near(tmp_path: Path) -> None:
    image = lesion_picture(0)
    same = prints(tmp_path, image, lesion_picture(1), image, image)
    assert exact_pairs(same) == [(0, 2), (0, 3)]
    assert near_pairs(same) == []
    # Pictures of one color are compared by value.
    white, black, small = Image.new("RGB", (64, 64), "white"), Image.new("RGB", (64, 64)), Image.new("RGB", (32, 32), "white")
    assert near_pairs(prints(tmp_path, white, black, small)) == [(0, 2)]
    assert near_pairs({}) == []


def test_groups_join_along_chains_of_pairs() -> None:
    assert merge(["d", "b", "c", "a", "b"], [(0, 1), (1, 2)]) == ["b", "b", "b", "a", "b"]
    assert merge(list("abcde"), [(3, 4), (2, 3), (1, 2), (0, 1)]) == ["a"] * 5
    assert merge(["x", "y"], []) == ["x", "y"]


def test_an_unreadable_image_is_named_and_keeps_its_group(tmp_path: Path) -> None:
    save(lesion_picture(0), tmp_path / "a.png")
    save(lesion_picture(0).resize((48, 36)), tmp_path / "b.png")
    (tmp_path / "c.png").write_bytes(b"no picture")
    rows = [{"image_id": name, "image": f"{name}.png"} for name in "abc"]
    groups, unreadable = merged_groups(Manifest.from_records(rows, (), root=tmp_path))
    assert groups == ["a", "a", "c"]
    assert unreadable == ["c"]


def test_close_hashes_are_all_pairs_of_a_plain_comparison_in_order() -> None:
    # More than one block of 512.
    hashes = np.random.default_rng(1).integers(0, 1 << 12, 700).astype(np.uint64)
    left, right = _close_hashes(hashes, 1)
    known = [int(value) for value in hashes]
    plain = [(i, j) for i in range(700) for j in range(i + 1, 700) if bin(known[i] ^ known[j]).count("1") <= 1]
    assert list(zip(left.tolist(), right.tolist())) == plain
