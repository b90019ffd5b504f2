"""DICOM files written with pydicom and read by the one decoder."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian, JPEGBaseline8Bit, JPEGLSLossless, SecondaryCaptureImageStorage, generate_uid

from medtokenbudget.cli import main
from medtokenbudget.data import DecodeError, decode_image, decode_mask
from medtokenbudget.data.walk import image_files

SECRETS = ("Doe^Jane", "MRN-4711", "19610203")
COLORS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
GRAYS = np.arange(48, dtype=np.uint8).reshape(6, 8) * 5


def write(path: Path, values: np.ndarray, photometric: str, **attributes: Any) -> Path:
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


def test_rgb_pixels_are_read_as_they_are(tmp_path: Path) -> None:
    assert (pixels(write(tmp_path / "a.dcm", COLORS, "RGB")) == COLORS).all()


def test_a_dicom_file_is_known_by_its_content_and_read_from_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "without-ending", COLORS, "RGB")
    assert (np.asarray(decode_image(path.read_bytes())) == COLORS).all()


def test_full_range_ybr_becomes_rgb(tmp_path: Path) -> None:
    ybr = np.asarray(Image.fromarray(COLORS).convert("YCbCr"))
    difference = np.abs(pixels(write(tmp_path / "a.dcm", ybr, "YBR_FULL")).astype(int) - COLORS)
    assert difference.max() <= 3


def test_monochrome_2_is_bright_where_values_are_high_and_monochrome_1_where_they_are_low(tmp_path: Path) -> None:
    assert (np.asarray(decode_mask(write(tmp_path / "a.dcm", GRAYS, "MONOCHROME2"))) == GRAYS).all()
    assert (np.asarray(decode_mask(write(tmp_path / "b.dcm", GRAYS, "MONOCHROME1"))) == 255 - GRAYS).all()


def test_gray_values_of_twelve_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    values = np.array([[0, 2048, 4095]], dtype=np.uint16)
    path = write(tmp_path / "a.dcm", values, "MONOCHROME2", BitsStored=12, HighBit=11)
    assert np.asarray(decode_mask(path)).tolist() == [[0, 128, 255]]


def test_a_window_decides_what_is_black_and_white(tmp_path: Path) -> None:
    values = np.array([[0, 1000, 1500, 2000, 4095]], dtype=np.uint16)
    window = {"WindowCenter": 1500, "WindowWidth": 1001, "BitsStored": 12, "HighBit": 11}
    found = np.asarray(decode_mask(write(tmp_path / "a.dcm", values, "MONOCHROME2", **window))).tolist()[0]
    assert (found[0], found[1], found[3], found[4]) == (0, 0, 255, 255)
    assert abs(found[2] - 128) <= 1


def test_a_palette_gives_its_colors(tmp_path: Path) -> None:
    names = ("Red", "Green", "Blue")
    table = np.arange(256, dtype=np.uint16) * 257
    tables = {f"{name}PaletteColorLookupTableDescriptor": [256, 0, 16] for name in names}
    shifted = {f"{name}PaletteColorLookupTableData": np.roll(table, shift).tobytes() for name, shift in zip(names, (0, 1, 2))}
    found = pixels(write(tmp_path / "a.dcm", GRAYS, "PALETTE COLOR", **tables, **shifted))
    expected = np.stack([np.roll(np.arange(256), shift)[GRAYS] for shift in (0, 1, 2)], axis=-1)
    assert (found == expected).all()


def test_a_jpeg_inside_is_decoded(tmp_path: Path) -> None:
    smooth = np.full((16, 16, 3), (180, 120, 90), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(smooth).save(buffer, "JPEG", quality=95)
    data = {"syntax": JPEGBaseline8Bit, "PixelData": encapsulate([buffer.getvalue()])}
    found = pixels(write(tmp_path / "a.dcm", smooth, "YBR_FULL_422", **data))
    assert np.abs(found.astype(int) - smooth).max() <= 4


def test_pixels_that_no_decoder_reads_are_named_by_their_compression(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", GRAYS, "MONOCHROME2", syntax=JPEGLSLossless, PixelData=encapsulate([b"\0" * 20]))
    with pytest.raises(DecodeError, match=r"compressed as JPEG-LS .* no decoder is installed"):
        decode_image(path)


def test_several_frames_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", GRAYS, "MONOCHROME2", NumberOfFrames=2, PixelData=GRAYS.tobytes() * 2)
    with pytest.raises(DecodeError, match="several frames") as caught:
        decode_image(path)
    assert caught.value.kind == "frames"


def test_a_report_without_an_image_says_what_it_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", GRAYS, "MONOCHROME2")
    data = pydicom.dcmread(path)
    del data.PixelData
    data.save_as(path)
    with pytest.raises(DecodeError, match=r"without an image .it has no PixelData"):
        decode_image(path)


def test_a_file_that_is_cut_short_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", COLORS, "RGB")
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(DecodeError) as caught:
        decode_image(path)
    assert caught.value.kind == "damaged"


def test_the_size_is_checked_before_the_pixels_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.dcm", COLORS, "RGB", Rows=60_000, Columns=60_000)
    with pytest.raises(DecodeError, match="60000 x 60000 pixels"):
        decode_image(path)


def test_without_pydicom_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.dcm", COLORS, "RGB")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DecodeError, match=r"pip install 'medtokenbudget\[dicom\]'"):
        decode_image(path)


def test_patient_fields_reach_neither_outputs_nor_messages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    lesion = np.full((64, 64, 3), 200, dtype=np.uint8)
    lesion[20:44, 20:44] = (90, 60, 50)
    write(folder / "good.dcm", lesion, "RGB")
    cut = write(folder / "cut.dcm", lesion, "RGB")
    cut.write_bytes(cut.read_bytes()[:-600])
    assert [path.name for path in image_files(folder)] == ["cut.dcm", "good.dcm"]
    assert main(["route", str(folder), "--out", str(tmp_path / "routed"), "--overlay", "--tokens", "--table", "csv"]) in (0, 1)
    said = "".join(capfd.readouterr())
    written = [path for path in (tmp_path / "routed").rglob("*") if path.is_file()]
    assert any(path.suffix == ".csv" and "good.dcm" in path.read_text() for path in written)
    assert "cut.dcm" in (tmp_path / "routed" / "errors.jsonl").read_text()
    for secret in SECRETS:
        assert secret not in said
        assert not [path for path in written if secret.encode() in path.read_bytes()]
