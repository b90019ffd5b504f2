"""Decoding: what is accepted comes out as the same picture, what is not is rejected by name."""

from __future__ import annotations

import errno
import io
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from medtokenbudget.data import DecodeError, decode_image, decode_mask
from medtokenbudget.errors import WorkError
from tests.data.pictures import disc_mask, lesion_picture, save


def png_header(width: int, height: int) -> bytes:
    """The start of a PNG that claims a size, without the pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


def transparent(mode: str = "RGBA") -> Image.Image:
    image = lesion_picture(0).convert(mode)
    image.putpixel((0, 0), (10, 10, 10, 0) if mode == "RGBA" else (10, 0))
    return image


def palette_with_hole() -> bytes:
    return encoded(lesion_picture(0).quantize(16), "PNG", transparency=0)


def flipped_byte() -> bytes:
    data = bytearray(encoded(lesion_picture(0), "PNG"))
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


def half(kind: str) -> bytes:
    data = encoded(lesion_picture(0), kind)
    return data[: len(data) // 2]


def sixteen_bit(transparent_value: int) -> bytes:
    values = np.array([[0, 1000, 30000, 65535]], dtype=np.uint16)
    return encoded(Image.fromarray(values), "PNG", transparency=transparent_value)


BAD: dict[str, tuple[object, str, str]] = {
    "missing": (None, "missing", "does not exist"),
    "folder": ("folder", "folder", "is a folder"),
    "empty": (b"", "empty", "0 bytes"),
    "text": (b"image,label\na.jpg,MEL\n", "not-an-image", "not an image"),
    "html page saved as jpg": (b"<!DOCTYPE html><html>404</html>", "not-an-image", "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not-an-image", "not an image"),
    "jpeg cut in the middle": (half("JPEG"), "damaged", "damaged or incomplete"),
    "png cut in the middle": (half("PNG"), "damaged", "damaged or incomplete"),
    "png cut in its header": (encoded(lesion_picture(0), "PNG")[:20], "not-an-image|damaged", "header"),
    "png with a flipped byte": (flipped_byte(), "damaged", "damaged or incomplete"),
    "tiff cut in the middle": (half("TIFF"), "damaged|not-an-image", "damaged|header"),
    "bomb": (png_header(30_000, 30_000), "too-large", "pixels"),
    "above the limit": (png_header(12_000, 9_000), "too-large", "12000 x 9000 pixels, more than the allowed 100,000,000"),
    "animated gif": (
        encoded(lesion_picture(0), "GIF", save_all=True, append_images=[lesion_picture(1), lesion_picture(2)]),
        "frames",
        "several frames",
    ),
    "animated png": (encoded(lesion_picture(0), "PNG", save_all=True, append_images=[lesion_picture(1)]), "frames", "several"),
    "tiff of two pages": (
        encoded(lesion_picture(0), "TIFF", save_all=True, append_images=[lesion_picture(1)]),
        "frames",
        "several frames",
    ),
    "transparent rgba": (encoded(transparent("RGBA"), "PNG"), "alpha", "transparent pixels"),
    "transparent gray": (encoded(transparent("LA"), "PNG"), "alpha", "transparent pixels"),
    "palette with a transparent color": (palette_with_hole(), "alpha", "transparent pixels"),
    "16-bit gray with a transparent value": (sixteen_bit(0), "alpha", "transparent pixels"),
    "float pixels": (encoded(lesion_picture(0).convert("F"), "TIFF"), "mode", "pixel format 'F'"),
    "lab pixels": (encoded(Image.new("LAB", (9, 9)), "TIFF"), "mode", "pixel format 'LAB'"),
    "32-bit pixels": (encoded(Image.fromarray(np.full((9, 9), 70_000, np.int32)), "TIFF"), "mode", "outside 0..65535"),
}


@pytest.mark.parametrize("decode", [decode_image, decode_mask])
@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_rejected_by_name(tmp_path: Path, case: str, decode: object) -> None:
    content, kinds, message = BAD[case]
    path = tmp_path / "picture.jpg"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    with pytest.raises(DecodeError, match=message) as caught:
        decode(path)  # type: ignore[operator]
    assert caught.value.kind in kinds.split("|")
    assert "picture.jpg" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_bomb_is_rejected_from_its_header_without_a_look_at_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise AssertionError("the pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", explode)
    monkeypatch.setattr(ImageFile.ImageFile, "verify", explode)
    with pytest.raises(DecodeError) as caught:
        decode_image(png_header(30_000, 30_000))
    assert caught.value.kind == "too-large"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_no_cut_of_a_file_is_taken_for_the_picture(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    whole = encoded(lesion_picture(3), kind, **options)
    expected = np.asarray(decode_image(whole))
    for cut in np.linspace(1, len(whole) - 40, 40).astype(int):
        try:
            decoded = np.asarray(decode_image(whole[:cut]))
        except DecodeError:
            continue
        # Only bytes after the last pixel may be missing.
        np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG"])
def test_exif_orientation_turns_image_and_mask_alike(kind: str, orientation: int) -> None:
    picture, mask = lesion_picture(1), disc_mask().crop((30, 0, 90, 60))
    exif = Image.Exif()
    exif[0x0112] = orientation
    for upright, decode in ((picture, decode_image), (mask, decode_mask)):
        data = encoded(upright, kind, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        np.testing.assert_array_equal(np.asarray(decode(data)), np.asarray(expected))


def test_sixteen_bit_grey_is_scaled_by_its_range() -> None:
    values = np.array([[0, 128, 129, 257, 32768, 65278, 65535]], dtype=np.uint16)
    decoded = np.asarray(decode_mask(encoded(Image.fromarray(values), "PNG")))
    np.testing.assert_array_equal(decoded, np.round(values / 257).astype(np.uint8))
    colors = np.asarray(decode_image(encoded(Image.fromarray(values), "PNG")))
    np.testing.assert_array_equal(colors[..., 0], decoded)


def test_sixteen_bit_grey_whose_transparent_value_no_pixel_has_is_scaled_too() -> None:
    np.testing.assert_array_equal(np.asarray(decode_mask(sixteen_bit(77))), [[0, 4, 117, 255]])


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "RGB"])
def test_other_modes_show_the_same_picture(mode: str) -> None:
    image = lesion_picture(2).convert(mode)
    decoded = decode_image(encoded(image, "PNG"))
    assert decoded.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(image.convert("RGB")))


def test_cmyk_jpeg_comes_out_in_its_colors() -> None:
    data = encoded(Image.new("RGB", (32, 32), (200, 40, 90)).convert("CMYK"), "JPEG", quality=100)
    np.testing.assert_allclose(np.asarray(decode_image(data)).mean((0, 1)), (200, 40, 90), atol=4)


DARK_MASKS = {
    "gray of 0 and 1": (np.uint8, 1, "only the values 0 and 1", "Multiply its values by 255."),
    "16-bit gray of 0 and 1": (np.uint16, 1, "only the values 0 and 1", "Multiply its values by 65535."),
    "8 bits in 16": (np.uint16, 255, "values from 0 to 255", "Save it with 65535 for lesion and 0 elsewhere."),
    "class numbers": (np.uint8, 2, "values from 0 to 2", "Save it with 255 for lesion and 0 elsewhere."),
    "just below half": (np.uint8, 127, "values from 0 to 127", "Save it with 255 for lesion and 0 elsewhere."),
}


@pytest.mark.parametrize("kind", DARK_MASKS)
def test_a_mask_that_is_not_empty_but_too_dark_for_a_lesion_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    dtype, lesion, values, advice = DARK_MASKS[kind]
    path = tmp_path / "dark_mask.png"
    Image.fromarray((np.asarray(disc_mask()) > 0).astype(dtype) * dtype(lesion)).save(path)
    with pytest.raises(DecodeError, match=re.escape(f"{path} has {values}, so no pixel counts as lesion. {advice}")) as caught:
        decode_mask(path)
    assert caught.value.kind == "mask-values"
    decode_image(path)  # a dark picture is a picture


def test_an_empty_mask_and_one_just_above_half_are_read(tmp_path: Path) -> None:
    for lesion in (0, 128, 255):
        pixels = (np.asarray(disc_mask()) > 0).astype(np.uint8) * np.uint8(lesion)
        Image.fromarray(pixels).save(tmp_path / "mask.png")
        np.testing.assert_array_equal(np.asarray(decode_mask(tmp_path / "mask.png")), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_a_mask_is_black_and_white_whatever_its_mode(mode: str) -> None:
    mask = disc_mask()
    decoded = decode_mask(encoded(mask.convert(mode), "PNG"))
    assert decoded.mode == "L"
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(mask))


def test_paths_bytes_and_streams_give_the_same_pixels(tmp_path: Path) -> None:
    path = save(lesion_picture(4), tmp_path / "a.png")
    expected = np.asarray(decode_image(path))
    np.testing.assert_array_equal(np.asarray(decode_image(str(path))), expected)
    np.testing.assert_array_equal(np.asarray(decode_image(path.read_bytes())), expected)
    with path.open("rb") as stream:
        np.testing.assert_array_equal(np.asarray(decode_image(stream)), expected)


def test_running_out_of_memory_is_not_the_fault_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    Image.new("RGB", (8, 8)).save(data, format="PNG")

    def no_memory(self: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", no_memory)
    with pytest.raises(MemoryError):
        decode_image(data.getvalue())


def test_too_few_file_handles_are_not_the_fault_of_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path)

    def no_handles(self: Path, *_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "open", no_handles)
    with pytest.raises(WorkError, match=r"a\.png: Too many open files"):
        decode_image(path)


def many_scans(size: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    stream = io.BytesIO()
    Image.effect_noise((size, size), 50).save(stream, format="JPEG", progressive=True, quality=5)
    data = stream.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


def test_a_jpeg_of_thousands_of_scans_is_rejected_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bomb = many_scans(256, 1), many_scans(256, 3000)
    assert decode_image(plain).size == (256, 256)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(DecodeError, match=r"3,0\d\d scans, more than the 500") as caught:
        decode_image(bomb)
    assert caught.value.kind == "too-many-scans"


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_a_second_frame_is_noticed_without_reading_thousands_of_them(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    one = lesion_picture(0)
    many = encoded(one, kind, save_all=True, append_images=[lesion_picture(1)] * 3)
    assert decode_image(encoded(one, kind)).size == one.size
    plugin = type(Image.open(io.BytesIO(many)))
    monkeypatch.setattr(plugin, "n_frames", property(lambda self: pytest.fail("read every frame")))
    with pytest.raises(DecodeError, match="several frames or pages") as caught:
        decode_image(many)
    assert caught.value.kind == "frames"


def test_a_large_progressive_photo_is_an_ordinary_image() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (6000, 5000), (200, 150, 120)).save(stream, format="JPEG", progressive=True)
    assert decode_image(stream.getvalue()).size == (6000, 5000)
