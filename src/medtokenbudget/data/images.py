"""From a file to pixels. The only place where an image file is opened, so that all images and masks are read by the same rules.

A file that cannot be read without guessing is an error with a kind (`DecodeError.kind`); nothing is cropped or replaced. DICOM
files need the extra `dicom`.
"""

from __future__ import annotations

import errno
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import Image

from medtokenbudget.errors import RequestError, WorkError, first_line

if TYPE_CHECKING:
    from pydicom.dataset import FileDataset

MAX_PIXELS = 100_000_000
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "GIF", "PPM", "JPEG2000")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".jp2", ".dcm", ".dicom"})
Source = Path | str | bytes | BinaryIO | Image.Image
MIN_SCANS, MAX_SCANS = 25, 500
"""Scans of a JPEG that are always and never accepted; in between `SCANNED_PIXELS` decides."""
SCANNED_PIXELS = 1_000_000_000
"""Pixels times scans that take about two seconds."""
_ORIENTATION = 0x0112
# Not `ImageOps.exif_transpose`: it also writes all EXIF tags anew and fails where a camera wrote one of them wrongly.
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SEVERAL_FRAMES = "contains several frames or pages. Save the one you need as a separate file."
_OPAQUE = {"RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV"}
_ALPHA = {"RGBA", "LA", "PA", "RGBa", "La"}

_PHOTOMETRIC = ("RGB", "MONOCHROME1", "MONOCHROME2", "PALETTE COLOR", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
# A DICOM file is a patient's record with pixels in it. Only what describes the pixels is ever read, so that names, numbers and
# dates cannot reach an output or a log.
_PIXEL_ATTRIBUTES = (
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "RescaleIntercept", "RescaleSlope"),
    *("RedPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableDescriptor"),
    *("RedPaletteColorLookupTableData", "GreenPaletteColorLookupTableData", "BluePaletteColorLookupTableData"),
)

# `_check_size` below is stricter than Pillow's warning, which would only repeat it.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class DecodeError(RequestError):
    """A file that cannot be read; `kind` is 'missing', 'folder', 'empty', 'not-an-image', 'damaged', 'too-large', 'too-many-scans',
    'frames', 'alpha', 'mode', 'mask-aspect' or 'mask-values'.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.kind)


def decode_image(source: Source, max_pixels: int = MAX_PIXELS, name: str = "The image") -> Image.Image:
    """Read an image as RGB, rotated by its EXIF orientation.

    Gray, palette, 1-bit, 16-bit gray (scaled by 255 / 65535) and CMYK images are converted. An alpha channel is dropped if it is
    fully opaque. The extra frames of a camera's MPO file are previews and are ignored. DICOM files are read for their pixels only.
    Pillow's own limit of 178,956,970 pixels always applies; `name` is for messages about an image without a file name.
    """
    picture = _decode(source, max_pixels, name).convert("RGB")
    picture.info = {}  # its EXIF orientation was applied, and must not be once more
    return picture


def decode_mask(source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read a mask as 8-bit gray (mode L, 0 to 255), rotated by its EXIF orientation, by the rules of `decode_image`.

    A mask that has pixels above 0, but none that counts as lesion, is a DecodeError.
    """
    return _decode(source, max_pixels, "The mask", mask=True).convert("L")


def require_lesion_values(name: str, mask: Image.Image) -> None:
    """Reject a mask that is not empty, but too dark for any pixel to count as lesion, such as one of the values 0 and 1.

    Whether 1 means lesion or nothing cannot be known, so nothing is guessed: reading it as empty would lose the lesion silently.
    """
    deep = _is_16_bit(mask)
    brightest, white = int(np.asarray(mask if deep else mask.convert("L")).max(initial=0)), 65535 if deep else 255
    if 0 < brightest <= white // 2:
        values = "only the values 0 and 1" if brightest == 1 else f"values from 0 to {brightest}"
        advice = f"Multiply its values by {white}" if brightest == 1 else f"Save it with {white} for lesion and 0 elsewhere"
        raise DecodeError(f"{name} has {values}, so no pixel counts as lesion. {advice}.", "mask-values")


def _decode(source: Source, max_pixels: int, name: str, mask: bool = False) -> Image.Image:
    """Decode to one of the modes L, 1, P (without transparency), RGB, YCbCr, HSV."""
    if isinstance(source, Image.Image):
        image = source
        _check_size(name, image.size, max_pixels)
        with _decoding(name):
            image.load()
    else:
        name, stream = _open(source, name)
        try:
            start = stream.tell()
            # A DICOM file has 128 bytes of anything before its mark.
            stream.seek(start + 128)
            is_dicom = stream.read(4) == b"DICM"
            stream.seek(start)
            image = (_decode_dicom if is_dicom else _decode_picture)(name, stream, max_pixels)
        finally:
            # A stream of the caller stays open.
            if isinstance(source, (Path, str)):
                stream.close()
    plain = _plain_mode(name, image)
    if mask:
        # Before 16 bits are scaled to 8, which makes the values 0 and 1 an empty mask.
        require_lesion_values(name, image if _is_16_bit(image) else plain)
    orientation = image.getexif().get(_ORIENTATION, 1)
    return plain.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else plain


def _open(source: Path | str | bytes | BinaryIO, what: str) -> tuple[str, BinaryIO]:
    if isinstance(source, bytes):
        if not source:
            raise DecodeError(f"{what} is empty (0 bytes).", "empty")
        return what, io.BytesIO(source)
    if not isinstance(source, (str, Path)):
        return str(getattr(source, "name", None) or what), source
    path = Path(source)
    try:
        if path.is_dir():
            raise DecodeError(f"{path} is a folder, not an image.", "folder")
        if path.stat().st_size == 0:
            raise DecodeError(f"{path} is empty (0 bytes). Download or copy it again.", "empty")
        return str(path), path.open("rb")
    except FileNotFoundError:
        raise DecodeError(f"{path} does not exist.", "missing") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            # Not the fault of the file: another try can succeed, so it must not be recorded as one.
            raise WorkError(f"Cannot open {path}: {error.strerror}. Raise `ulimit -n`, or use fewer workers.") from None
        raise DecodeError(f"{path} cannot be opened: {error.strerror or error}.", "missing") from None
    except DecodeError:
        raise
    except ValueError as error:  # a null byte in the name
        raise DecodeError(f"{path} cannot be opened: {error}.", "missing") from None


@contextmanager
def _decoding(name: str, failed: str = "is damaged or incomplete ({reason})") -> Iterator[None]:
    """Turn what a decoder raises on damaged bytes, a dozen types with Pillow's plugins alone, into a DecodeError."""
    try:
        yield
    except (MemoryError, DecodeError):
        raise
    except Exception as error:
        raise DecodeError(f"{name} {failed.format(reason=first_line(error))}. Download or copy it again.", "damaged") from None


def _decode_picture(name: str, stream: BinaryIO, max_pixels: int) -> Image.Image:
    """Decode a file that Pillow reads; size, frames and scans are checked first, since decoding may take minutes or all memory."""
    with _decoding(name, "has a damaged header ({reason})"):
        try:
            image: Image.Image = Image.open(stream, formats=FORMATS)
        except Image.DecompressionBombError:
            raise DecodeError(f"{name} has far more pixels than allowed. Resize it first.", "too-large") from None
        except Image.UnidentifiedImageError:
            kinds = ", ".join((*FORMATS, "DICOM"))
            text = f"{name} is not an image in a supported format ({kinds}), or its header is damaged."
            raise DecodeError(text, "not-an-image") from None
    _check_size(name, image.size, max_pixels)
    with _decoding(name):
        # The second frame of a camera's MPO is a preview. Not `n_frames`, which reads them all: minutes for a large TIFF.
        if image.format != "MPO":
            try:
                image.seek(1)
                raise DecodeError(f"{name} {_SEVERAL_FRAMES}", "frames")
            except EOFError:
                image.seek(0)
        if image.format in ("JPEG", "MPO"):
            _check_scans(name, image.size, stream)
        if image.format == "PNG":
            # Pillow checks the checksums only on request, and a verified image must be opened again.
            image.verify()
            stream.seek(0)
            image = Image.open(stream, formats=FORMATS)
        image.load()
        image.getexif()
    return image


def _check_size(name: str, size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise DecodeError(
            f"{name} has {width} x {height} pixels, more than the allowed {max_pixels:,}. Resize it first.", "too-large"
        )
    if width < 1 or height < 1:
        raise DecodeError(f"{name} has no pixels ({width} x {height}).", "damaged")


def _check_scans(name: str, size: tuple[int, int], stream: BinaryIO) -> None:
    """Reject a JPEG of many scans: each is decoded, so a small file of thousands takes many seconds. Most have up to 15."""
    allowed = max(MIN_SCANS, min(MAX_SCANS, SCANNED_PIXELS // (size[0] * size[1])))
    position, scans, last = stream.tell(), 0, b""
    stream.seek(0)
    while chunk := stream.read(1 << 20):
        # With the last byte before it: the marker of two bytes may lie across two chunks.
        scans += (last + chunk).count(b"\xff\xda")  # the marker "start of scan"
        last = chunk[-1:]
    stream.seek(position)
    if scans > allowed:
        raise DecodeError(
            f"{name} is a JPEG of {scans:,} scans, more than the {allowed} allowed for its size. Save it as a plain JPEG or PNG.",
            "too-many-scans",
        )


def _is_16_bit(image: Image.Image) -> bool:
    return image.mode == "I" or image.mode.startswith("I;16")


def _plain_mode(name: str, image: Image.Image) -> Image.Image:
    """Convert to 8 bits without transparency; 16-bit gray is scaled, 65535 becomes 255."""
    transparent = DecodeError(
        f"{name} has transparent pixels, so its colors depend on the background. Flatten it onto a background first.", "alpha"
    )
    if _is_16_bit(image):
        values = np.asarray(image).astype(np.int64)
        if (values == image.info.get("transparency")).any():  # a PNG may declare one value as transparent
            raise transparent
        if values.min() < 0 or values.max() > 65535:
            raise DecodeError(f"{name} has 32-bit pixels outside 0..65535. Save it as 8-bit RGB or gray.", "mode")
        # Rounded, and in whole numbers: no float on the way.
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    # Palettes and gray values name a transparent color instead of having an alpha channel.
    if image.mode in _ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            raise transparent
        return image.convert("RGB")
    if image.mode not in _OPAQUE:
        raise DecodeError(
            f"{name} has the pixel format '{image.mode}', which has no standard value range. Save it as 8-bit RGB or gray.", "mode"
        )
    return image.convert("RGB") if image.mode == "CMYK" else image


def _decode_dicom(name: str, stream: BinaryIO, max_pixels: int) -> Image.Image:
    """Decode to mode RGB or L: YBR and palettes converted, gray values windowed if the file has a window."""
    try:
        import pydicom
        from pydicom.pixels import apply_color_lut
    except ImportError:
        raise DecodeError(
            f"{name} is a DICOM file, and pydicom is not installed. Install it with: pip install 'medtokenbudget[dicom]'.",
            "not-an-image",
        ) from None
    # Without pydicom's text, which may quote what it read: a patient's name.
    with _decoding(name, "has a damaged DICOM header"):
        data = pydicom.dcmread(stream, specific_tags=list(_PIXEL_ATTRIBUTES))
    if missing := [key for key in ("Rows", "Columns", "PhotometricInterpretation", "PixelData") if key not in data]:
        raise DecodeError(f"{name} is a DICOM file without an image (it has no {', '.join(missing)}).", "not-an-image")
    if int(data.get("NumberOfFrames") or 1) > 1:
        raise DecodeError(f"{name} {_SEVERAL_FRAMES}", "frames")
    photometric = str(data.PhotometricInterpretation)
    if photometric not in _PHOTOMETRIC:
        raise DecodeError(f"{name} has the DICOM pixel format '{photometric}'. Save it as 8-bit RGB or gray.", "mode")
    _check_size(name, (int(data.Columns), int(data.Rows)), max_pixels)
    syntax = data.file_meta.TransferSyntaxUID
    with _decoding(name, "is damaged or incomplete (its pixels cannot be read)"):
        try:
            values = np.asarray(data.pixel_array)
        except Exception as error:
            if syntax.is_compressed and "decompress" in str(error):
                raise DecodeError(
                    f"{name} is compressed as {syntax.name}, for which no decoder is installed. Run "
                    "`pip install pylibjpeg[all]`, or save it uncompressed.",
                    "mode",
                ) from None
            raise
    if photometric.startswith("MONOCHROME"):
        gray = _dicom_gray(values, data)
        # MONOCHROME1 means that the smallest value is white.
        return Image.fromarray(255 - gray if photometric == "MONOCHROME1" else gray)
    bits = int(data.BitsStored)
    if photometric == "PALETTE COLOR":
        values = apply_color_lut(values, data)
        bits = 8 * values.dtype.itemsize
    # BitsStored may be less than the bits of the array: 12 of 16 are usual.
    scaled = values if bits == 8 else np.rint(values.astype(np.float64) * 255 / ((1 << bits) - 1))
    return Image.fromarray(scaled.astype(np.uint8))


def _dicom_gray(values: np.ndarray, data: FileDataset) -> np.ndarray:
    from pydicom.pixels import apply_modality_lut, apply_windowing

    bits = int(data.BitsStored)
    # PixelRepresentation 1 means that stored values are signed.
    low: float = -(1 << (bits - 1)) if int(data.get("PixelRepresentation", 0)) else 0
    high = low + (1 << bits) - 1
    if "WindowCenter" in data and "WindowWidth" in data:
        # Windowing maps to the range of the stored values, after rescaling.
        values = apply_windowing(apply_modality_lut(values, data), data)
        slope, intercept = float(data.get("RescaleSlope", 1)), float(data.get("RescaleIntercept", 0))
        low, high = low * slope + intercept, high * slope + intercept
    return np.clip(np.rint((values.astype(np.float64) - low) * 255 / (high - low)), 0, 255).astype(np.uint8)
