"""Decoding: what is accepted comes out as the same picture, what is not is rejected by name. DICOM files are by pydicom."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pydicom
import pytest
from PIL import Image, ImageFile, ImageOps
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian, JPEGBaseline8Bit, JPEGLSLossless, SecondaryCaptureImageStorage, generate_uid

from medtokenbudget.cli import main
from medtokenbudget.data import DecodeError, decode_image, decode_mask
from medtokenbudget.data.readers import image_files
from medtokenbudget.errors import WorkError
from tests.bad_input.damage import claims, cut, encoded
from tests.data.pictures import disc_mask, lesion_picture, many_scans, save


def transparent(mode: str, color: tuple[int, ...]) -> bytes:
    image = lesion_picture(0).convert(mode)
    image.putpixel((0, 0), color)
    return encoded(image, "PNG")


def half(kind: str) -> bytes:
    return cut(encoded(lesion_picture(0), kind))


def two_frames(kind: str) -> bytes:
    return encoded(lesion_picture(0), kind, save_all=True, append_images=[lesion_picture(1)])


def sixteen_bit(transparent_value: int) -> bytes:
    values = np.array([[0, 1000, 30000, 65535]], dtype=np.uint16)
    return encoded(Image.fromarray(values), "PNG", transparency=transparent_value)


FLIPPED = bytearray(encoded(lesion_picture(0), "PNG"))
FLIPPED[len(FLIPPED) // 2] ^= 0xFF
BAD: dict[str, tuple[object, str, str]] = {
    "missing": (None, "missing", "does not exist"),
    "folder": ("folder", "folder", "is a folder"),
    "empty": (b"", "empty", "0 bytes"),
    "text": (b"image,label\na.jpg,MEL\n", "not-an-image", "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not-an-image", "not an image"),
    "jpeg cut in the middle": (half("JPEG"), "damaged", "damaged or incomplete"),
    "png cut in the middle": (half("PNG"), "damaged", "damaged or incomplete"),
    "png cut in its header": (encoded(lesion_picture(0), "PNG")[:20], "not-an-image|damaged", "header"),
    "png with a flipped byte": (bytes(FLIPPED), "damaged", "damaged or incomplete"),
    "tiff cut in the middle": (half("TIFF"), "damaged|not-an-image", "damaged|header"),
    "bmp cut in the middle": (half("BMP"), "damaged", "damaged or incomplete"),
    "only zeros": (bytes(5000), "not-an-image", "not an image"),
    "png without pixels": (claims(0, 4), "not-an-image|damaged", "not an image|damaged"),
    "above the limit": (claims(12_000, 9_000), "too-large", "12000 x 9000 pixels, more than the allowed 100,000,000"),
    "animated gif": (two_frames("GIF"), "frames", "several frames"),
    "animated png": (two_frames("PNG"), "frames", "several frames"),
    "tiff of two pages": (two_frames("TIFF"), "frames", "several frames"),
    "transparent rgba": (transparent("RGBA", (10, 10, 10, 0)), "alpha", "transparent pixels"),
    "transparent webp": (encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 100)), "WEBP"), "alpha", "transparent pixels"),
    "transparent gray": (transparent("LA", (10, 0)), "alpha", "transparent pixels"),
    "palette with a transparent color": (
        encoded(lesion_picture(0).quantize(16), "PNG", transparency=0),
        "alpha",
        "transparent pixels",
    ),
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
        decode(path)
    assert caught.value.kind in kinds.split("|")
    assert "picture.jpg" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_no_cut_of_a_file_is_taken_for_the_picture(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    whole = encoded(lesion_picture(3), kind, **options)
    expected = np.asarray(decode_image(whole))
    for place in np.linspace(1, len(whole) - 40, 20).astype(int):
        try:
            decoded = np.asarray(decode_image(whole[:place]))
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


def test_a_photo_whose_camera_wrote_a_wrong_tag_is_read_and_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x011A] = 2.0
    data = encoded(lesion_picture(1), "JPEG", exif=exif)
    # The resolution (tag 0x011A) becomes text instead of a fraction: Pillow reads it, but cannot write it again.
    wrong = data.replace(b"\x01\x1a\x00\x05\x00\x00\x00\x01", b"\x01\x1a\x00\x02\x00\x00\x00\x04")
    assert wrong != data
    upright = decode_image(encoded(lesion_picture(1), "JPEG"))
    np.testing.assert_array_equal(np.asarray(decode_image(wrong)), np.rot90(np.asarray(upright), -1))


def test_sixteen_bit_gray_is_scaled_by_its_range() -> None:
    values = np.array([[0, 128, 129, 257, 32768, 65278, 65535]], dtype=np.uint16)
    decoded = np.asarray(decode_mask(encoded(Image.fromarray(values), "PNG")))
    np.testing.assert_array_equal(decoded, np.round(values / 257).astype(np.uint8))
    colors = np.asarray(decode_image(encoded(Image.fromarray(values), "PNG")))
    np.testing.assert_array_equal(colors[..., 0], decoded)
    # No pixel has the value that is declared transparent.
    np.testing.assert_array_equal(np.asarray(decode_mask(sixteen_bit(77))), [[0, 4, 117, 255]])


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "RGB"])
def test_other_modes_show_the_same_picture_and_the_same_mask(mode: str) -> None:
    image = lesion_picture(2).convert(mode)
    decoded = decode_image(encoded(image, "PNG"))
    assert decoded.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(image.convert("RGB")))
    mask = decode_mask(encoded(disc_mask().convert(mode), "PNG"))
    assert mask.mode == "L"
    np.testing.assert_array_equal(np.asarray(mask), np.asarray(disc_mask()))


def test_a_cmyk_jpeg_comes_out_in_its_colors() -> None:
    cmyk = encoded(Image.new("RGB", (32, 32), (200, 40, 90)).convert("CMYK"), "JPEG", quality=100)
    np.testing.assert_allclose(np.asarray(decode_image(cmyk)).mean((0, 1)), (200, 40, 90), atol=4)


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


@pytest.mark.parametrize("lesion", [0, 128])
def test_an_empty_mask_and_one_just_above_half_are_read(lesion: int) -> None:
    values = (np.asarray(disc_mask()) > 0).astype(np.uint8) * np.uint8(lesion)
    np.testing.assert_array_equal(np.asarray(decode_mask(encoded(Image.fromarray(values), "PNG"))), values)


def test_paths_bytes_and_streams_give_the_same_pixels(tmp_path: Path) -> None:
    path = save(lesion_picture(4), tmp_path / "a.png")
    expected = np.asarray(decode_image(path))
    np.testing.assert_array_equal(np.asarray(decode_image(str(path))), expected)
    np.testing.assert_array_equal(np.asarray(decode_image(path.read_bytes())), expected)
    with path.open("rb") as stream:
        np.testing.assert_array_equal(np.asarray(decode_image(stream)), expected)


def test_too_little_memory_and_too_few_file_handles_are_not_the_fault_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(lesion_picture(0), tmp_path / "a.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        decode_image(path)
    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    with pytest.raises(WorkError, match=r"a\.png: Too many open files"):
        decode_image(path)


def test_bombs_of_scans_or_pixels_are_rejected_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bomb = many_scans(256, 1), many_scans(256, 3000)
    assert decode_image(plain).size == (256, 256)
    for method in ("load", "verify"):
        monkeypatch.setattr(ImageFile.ImageFile, method, lambda self: pytest.fail("decoded"))
    for data, kind, message in (
        (bomb, "too-many-scans", r"3,0\d\d scans, more than the 500"),
        (claims(30_000, 30_000), "too-large", "pixels"),
    ):
        with pytest.raises(DecodeError, match=message) as caught:
            decode_image(data)
        assert caught.value.kind == kind


def test_a_large_progressive_photo_is_an_ordinary_image() -> None:
    photo = Image.new("L", (6000, 5000), 150)
    assert decode_image(encoded(photo, "JPEG", progressive=True)).size == (6000, 5000)


SECRETS = ("Doe^Jane", "MRN-4711", "19610203")
COLORS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
GRAYS = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


def write_dicom(path: Path, values: np.ndarray, photometric: str, **attributes: Any) -> Path:
    """A DICOM file with patient fields; `values` is [H, W] or [H, W, 3]."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
    meta.TransferSyntaxUID = attributes.pop("syntax", ExplicitVRLittleEndian)
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.PatientName, data.PatientID, data.PatientBirthDate = SECRETS
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    data.Rows, data.Columns = values.shape[:2]
    data.SamplesPerPixel, data.PhotometricInterpretation = (3 if values.ndim == 3 else 1), photometric
    if values.ndim == 3:
        data.PlanarConfiguration = 0
    bits = 8 * values.dtype.itemsize
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = bits, bits, bits - 1, 0
    data.PixelData = values.tobytes()
    for name, value in attributes.items():
        setattr(data, name, value)
    data.save_as(path, enforce_file_format=True)
    return path


def pixels(path: Path) -> np.ndarray:
    return np.asarray(decode_image(path))


def test_a_dicom_file_is_known_by_its_content_and_its_colors_become_rgb(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "without-ending", COLORS, "RGB")
    assert (np.asarray(decode_image(path.read_bytes())) == COLORS).all()
    assert (pixels(path) == COLORS).all()
    ybr = np.asarray(Image.fromarray(COLORS).convert("YCbCr"))
    difference = np.abs(pixels(write_dicom(tmp_path / "a.dcm", ybr, "YBR_FULL")).astype(int) - COLORS)
    assert difference.max() <= 3


def test_monochrome_2_is_bright_where_values_are_high_and_monochrome_1_where_they_are_low(tmp_path: Path) -> None:
    assert (np.asarray(decode_mask(write_dicom(tmp_path / "a.dcm", GRAYS, "MONOCHROME2"))) == GRAYS).all()
    assert (np.asarray(decode_mask(write_dicom(tmp_path / "b.dcm", GRAYS, "MONOCHROME1"))) == 255 - GRAYS).all()
    values = np.array([[0, 2048, 4095]], dtype=np.uint16)
    path = write_dicom(tmp_path / "a.dcm", values, "MONOCHROME2", BitsStored=12, HighBit=11)
    assert np.asarray(decode_mask(path)).tolist() == [[0, 128, 255]]


def test_a_window_decides_what_is_black_and_white(tmp_path: Path) -> None:
    values = np.array([[0, 1000, 1500, 2000, 4095]], dtype=np.uint16)
    window = {"WindowCenter": 1500, "WindowWidth": 1001, "BitsStored": 12, "HighBit": 11}
    windowed = np.asarray(decode_mask(write_dicom(tmp_path / "a.dcm", values, "MONOCHROME2", **window)))
    np.testing.assert_allclose(windowed, [[0, 0, 128, 255, 255]], atol=1)


def test_a_palette_and_a_jpeg_inside_give_their_colors(tmp_path: Path) -> None:
    names, table = ("Red", "Green", "Blue"), np.arange(256, dtype=np.uint16) * 257
    tables = {f"{name}PaletteColorLookupTableDescriptor": [256, 0, 16] for name in names}
    shifted = {f"{name}PaletteColorLookupTableData": np.roll(table, shift).tobytes() for shift, name in enumerate(names)}
    colors = pixels(write_dicom(tmp_path / "a.dcm", GRAYS, "PALETTE COLOR", **tables, **shifted))
    assert (colors == np.stack([np.roll(np.arange(256), shift)[GRAYS] for shift in range(3)], axis=-1)).all()
    smooth = np.full((16, 16, 3), (180, 120, 90), dtype=np.uint8)
    data = {"syntax": JPEGBaseline8Bit, "PixelData": encapsulate([encoded(Image.fromarray(smooth), "JPEG", quality=95)])}
    np.testing.assert_allclose(pixels(write_dicom(tmp_path / "b.dcm", smooth, "YBR_FULL_422", **data)), smooth, atol=4)


BAD_DICOM = {
    "a compression that no decoder reads": (
        {"syntax": JPEGLSLossless, "PixelData": encapsulate([b"\0" * 20])},
        "mode",
        "compressed as JPEG-LS .* no decoder is installed",
    ),
    "several frames": ({"NumberOfFrames": 2, "PixelData": GRAYS.tobytes() * 2}, "frames", "several frames"),
    "too large, before the pixels are read": ({"Rows": 60_000, "Columns": 60_000}, "too-large", "60000 x 60000 pixels"),
    "cut short": ({"PixelData": GRAYS.tobytes()[:-20]}, "damaged", "damaged or incomplete"),
    "an unknown pixel format": ({"PhotometricInterpretation": "CMYK"}, "mode", "DICOM pixel format 'CMYK'"),
}


@pytest.mark.parametrize("case", BAD_DICOM)
def test_a_bad_dicom_file_is_rejected_by_name(tmp_path: Path, case: str) -> None:
    attributes, kind, message = BAD_DICOM[case]
    path = write_dicom(tmp_path / "a.dcm", GRAYS, "MONOCHROME2", **attributes)
    with pytest.raises(DecodeError, match=message) as caught:
        decode_image(path)
    assert caught.value.kind == kind


def test_a_report_without_an_image_and_a_lack_of_pydicom_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dicom(tmp_path / "a.dcm", GRAYS, "MONOCHROME2")
    data = pydicom.dcmread(path)
    del data.PixelData
    data.save_as(path)
    with pytest.raises(DecodeError, match=r"without an image .it has no PixelData"):
        decode_image(path)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DecodeError, match=r"pip install 'medtokenbudget\[dicom\]'"):
        decode_image(path)


def test_patient_fields_reach_neither_outputs_nor_messages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    lesion = np.full((64, 64, 3), 200, dtype=np.uint8)
    lesion[20:44, 20:44] = (90, 60, 50)
    write_dicom(folder / "good.dcm", lesion, "RGB")
    cut = write_dicom(folder / "cut.dcm", lesion, "RGB")
    cut.write_bytes(cut.read_bytes()[:-600])
    assert [path.name for path in image_files(folder)] == ["cut.dcm", "good.dcm"]
    assert main(["route", str(folder), "--out", str(tmp_path / "routed"), "--overlay", "--tokens", "--table", "csv"]) in (0, 1)
    printed = "".join(capfd.readouterr())
    written = [path for path in (tmp_path / "routed").rglob("*") if path.is_file()]
    assert any(path.suffix == ".csv" and "good.dcm" in path.read_text() for path in written)
    assert "cut.dcm" in (tmp_path / "routed" / "errors.jsonl").read_text()
    for secret in SECRETS:
        assert secret not in printed
        assert not [path for path in written if secret.encode() in path.read_bytes()]
