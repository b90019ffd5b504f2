"""Bad images and masks: each is named with its fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from medtokenbudget.data import decode_image, decode_mask
from medtokenbudget.data.masks import mask_of
from medtokenbudget.errors import MedTokenBudgetError
from tests.bad_input.damage import CLEAR, FRAMES, PLAIN, claims, cut, encoded
from tests.data.pictures import many_scans


def bad_checksum() -> bytes:
    data = bytearray(encoded(PLAIN, "PNG"))
    data[len(data) // 2] ^= 255
    return bytes(data)


IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is empty"),
    "text": (lambda: b"hello" * 100, "is not an image"),
    "html": (lambda: b"<html><body>404</body></html>", "is not an image"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not an image"),
    "pdf": (lambda: b"%PDF-1.7\n" + bytes(100), "is not an image"),
    "zip": (lambda: b"PK\x03\x04" + bytes(100), "is not an image"),
    "only zeros": (lambda: bytes(5000), "is not an image"),
    "half a JPEG": (lambda: cut(encoded(PLAIN, "JPEG")), "damaged or incomplete"),
    "half a PNG": (lambda: cut(encoded(PLAIN, "PNG")), "damaged or incomplete"),
    "half a BMP": (lambda: cut(encoded(PLAIN, "BMP")), "damaged or incomplete"),
    "half a PPM": (lambda: cut(encoded(PLAIN, "PPM")), "damaged or incomplete"),
    "the start of a JPEG": (lambda: encoded(PLAIN, "JPEG")[:4], "is not an image|damaged"),
    "a PNG with a wrong checksum": (bad_checksum, "damaged or incomplete"),
    "a PNG without pixels": (lambda: claims(0, 4), "is not an image|no pixels|damaged"),
    "too many pixels": (lambda: claims(20_000, 20_000), "pixels"),
    "far too many pixels": (lambda: claims(200_000, 200_000), "pixels"),
    "an animated GIF": (lambda: encoded(PLAIN.convert("P"), "GIF", **FRAMES), "several frames or pages"),
    "a TIFF of two pages": (lambda: encoded(PLAIN, "TIFF", **FRAMES), "several frames or pages"),
    "a transparent PNG": (lambda: encoded(CLEAR, "PNG"), "transparent pixels"),
    "a transparent gray PNG": (lambda: encoded(CLEAR.convert("LA"), "PNG"), "transparent pixels"),
    "a transparent WebP": (lambda: encoded(CLEAR, "WEBP"), "transparent pixels"),
    "a palette with a transparent color": (lambda: encoded(Image.new("P", (4, 4)), "PNG", transparency=0), "transparent pixels"),
    "a float TIFF": (lambda: encoded(Image.new("F", (4, 4)), "TIFF"), "pixel format 'F'"),
    "32-bit numbers": (lambda: encoded(Image.new("I", (4, 4), 70_000), "TIFF"), "32-bit pixels"),
    "a JPEG of 3,000 scans": (lambda: many_scans(256, 3000), "scans"),
}


@pytest.mark.parametrize("case", IMAGES)
@pytest.mark.parametrize("read", [decode_image, decode_mask])
def test_a_bad_image_or_mask_is_named_with_its_fault(tmp_path: Path, case: str, read: Callable[[Path], Any]) -> None:
    make, says = IMAGES[case]
    path = tmp_path / "picture.img"
    path.write_bytes(make())
    with pytest.raises(MedTokenBudgetError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_mask_of_another_shape_and_places_without_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mask.png"
    Image.new("L", (50, 10)).save(path)
    for action, says in (
        (lambda: mask_of(PLAIN.size, path), "mask.png has 50 x 10 pixels"),
        (lambda: decode_image(tmp_path), "is a folder"),
        (lambda: decode_image(tmp_path / "nothing"), "does not exist"),
        (lambda: decode_image("a\0b"), "cannot be opened"),
        (lambda: decode_image(tmp_path / ("x" * 300)), "cannot be opened"),
    ):
        with pytest.raises(MedTokenBudgetError, match=says):
            action()
