"""From a file to pixels. The only place where an image file is opened, so that all images and masks are read by the same rules.

A file that cannot be read without guessing is an error with a kind (`DecodeError.kind`); nothing is cropped or replaced. DICOM
files need the extra `dicom`.
"""

from __future__ import annotations

import errno
import io
import warnings
from collections.abc import Callable
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
Source = Path | str | bytes | BinaryIO
MIN_SCANS, MAX_SCANS = 25, 500
"""Scans of a JPEG that are always and never accepted; in between `SCANNED_PIXELS` decides."""
SCANNED_PIXELS = 1_000_000_000
"""Pixels times scans that take about two seconds."""
_SCAN = b"\xff\xda"

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
_DIRECT = {"RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV"}
_ALPHA = {"RGBA", "LA", "PA", "RGBa", "La"}

_DICOM_PREAMBLE, _DICOM_MAGIC = 128, b"DICM"
_PHOTOMETRIC = ("RGB", "MONOCHROME1", "MONOCHROME2", "PALETTE COLOR", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
# A DICOM file is a patient's record with pixels in it. Only what describes the pixels is ever read, so that names, numbers and
# dates cannot reach an output or a log.
_PIXEL_ATTRIBUTES = (
    *("SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration", "NumberOfFrames", "Rows", "Columns"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData"),
    *("WindowCenter", "WindowWidth", "VOILUTFunction", "RescaleIntercept", "RescaleSlope"),
    *(f"{color}PaletteColorLookupTable{part}" for color in ("Red", "Green", "Blue") for part in ("Descriptor", "Data")),
)

# `_check_size` below is stricter than Pillow's warning, which would only repeat it.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class DecodeError(RequestError):
    """A file that cannot be read.

    Attributes:
        kind: 'missing', 'folder', 'empty', 'not-an-image', 'damaged', 'too-large', 'too-many-scans', 'frames', 'alpha', 'mode',
            'mask-aspect' or 'mask-values'.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.kind)


def decode_image(source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read an image as RGB, rotated by its EXIF orientation.

    Gray, palette, 1-bit, 16-bit gray (scaled by 255 / 65535) and CMYK images are converted. An alpha channel is dropped if it is
    fully opaque. The extra frames of a camera's MPO file are previews and are ignored. DICOM files are read for their pixels only.

    Args:
        source: A path, the bytes of a file, or an open binary file.
        max_pixels: Largest number of pixels. Pillow's own limit of 178,956,970 pixels always applies.

    Returns:
        The image, in mode RGB.

    Raises:
        DecodeError: The file cannot be read, has transparent pixels, several frames or too many pixels.
    """
    return _decode(source, max_pixels).convert("RGB")


def decode_mask(source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read a mask as 8-bit gray (mode L, 0 to 255), rotated by its EXIF orientation, by the rules of `decode_image`.

    Raises:
        DecodeError: As `decode_image`, or the mask has pixels above 0, but none that counts as lesion.
    """
    return _decode(source, max_pixels, "The mask", require_lesion_values).convert("L")


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


def _decode(
    source: Source, max_pixels: int, what: str = "The image", check: Callable[[str, Image.Image], None] | None = None
) -> Image.Image:
    """Decode to one of the modes L, 1, P (without transparency), RGB, YCbCr, HSV; `check` sees the pixels with their full depth."""
    name, stream = _open(source, what)
    try:
        if _is_dicom(stream):
            plain = _decode_dicom(name, stream, max_pixels)
            if check is not None:
                check(name, plain)
            return plain
        image = _header(name, stream)
        _check_size(name, image.size, max_pixels)
        _check_frames(name, image)
        _check_scans(name, image, stream)
        try:
            image = _verified(image, stream)
            image.load()
            orientation = image.getexif().get(_ORIENTATION, 1)
        except MemoryError:
            raise
        # Pillow's plugins raise a dozen different types on damaged bytes.
        except Exception as error:
            raise _damaged(name, error) from None
    finally:
        if isinstance(source, (Path, str)):
            stream.close()
    plain = _plain_mode(name, image)
    if check is not None:
        check(name, image if _is_16_bit(image) else plain)
    return plain.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else plain


def _check_scans(name: str, image: Image.Image, stream: BinaryIO) -> None:
    """Reject a JPEG of many scans: each is decoded, so a small file of thousands takes many seconds. Most have up to 15."""
    if image.format not in ("JPEG", "MPO"):
        return
    allowed = max(MIN_SCANS, min(MAX_SCANS, SCANNED_PIXELS // (image.width * image.height)))
    position, scans, last = stream.tell(), 0, b""
    stream.seek(0)
    while chunk := stream.read(1 << 20):
        scans += (last + chunk).count(_SCAN)
        last = chunk[-1:]
    stream.seek(position)
    if scans > allowed:
        raise DecodeError(
            f"{name} is a JPEG of {scans:,} scans, more than the {allowed} allowed for its size. Save it as a plain JPEG or PNG.",
            "too-many-scans",
        )


def _verified(image: Image.Image, stream: BinaryIO) -> Image.Image:
    """Check the checksums of a PNG, which Pillow does only on request; a verified image must be opened again."""
    if image.format != "PNG":
        return image
    image.verify()
    stream.seek(0)
    return Image.open(stream, formats=FORMATS)


def _open(source: Source, what: str) -> tuple[str, BinaryIO]:
    if isinstance(source, bytes):
        if not source:
            raise DecodeError(f"{what} is empty (0 bytes).", "empty")
        return what, io.BytesIO(source)
    if not isinstance(source, (str, Path)):
        return str(getattr(source, "name", None) or what), source
    path = Path(source)
    try:
        folder, size = path.is_dir(), path.stat().st_size
        stream = None if folder or size == 0 else path.open("rb")
    except FileNotFoundError:
        raise DecodeError(f"{path} does not exist.", "missing") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            # Not the fault of the file: another try can succeed, so it must not be recorded as one.
            raise WorkError(f"Cannot open {path}: {error.strerror}. Raise `ulimit -n`, or use fewer workers.") from None
        raise DecodeError(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}.", "missing") from None
    if folder:
        raise DecodeError(f"{path} is a folder, not an image.", "folder")
    if stream is None:
        raise DecodeError(f"{path} is empty (0 bytes). Download or copy it again.", "empty")
    return str(path), stream


def _header(name: str, stream: BinaryIO) -> Image.Image:
    try:
        return Image.open(stream, formats=FORMATS)
    except Image.DecompressionBombError:
        raise DecodeError(f"{name} has far more pixels than allowed. Resize it first.", "too-large") from None
    except Image.UnidentifiedImageError:
        kinds = ", ".join((*FORMATS, "DICOM"))
        raise DecodeError(
            f"{name} is not an image in a supported format ({kinds}), or its header is damaged.", "not-an-image"
        ) from None
    except MemoryError:
        raise
    except Exception as error:
        raise DecodeError(f"{name} has a damaged header ({first_line(error)}). Download or copy it again.", "damaged") from None


def _check_size(name: str, size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise DecodeError(
            f"{name} has {width} x {height} pixels, more than the allowed {max_pixels:,}. Resize it first.", "too-large"
        )
    if width < 1 or height < 1:
        raise DecodeError(f"{name} has no pixels ({width} x {height}).", "damaged")


def _check_frames(name: str, image: Image.Image) -> None:
    if image.format == "MPO":
        return
    try:
        image.seek(1)  # not `n_frames`, which reads them all: minutes for a TIFF of some megabytes
    except EOFError:
        image.seek(0)
        return
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(name, error) from None
    raise _several_frames(name)


def _plain_mode(name: str, image: Image.Image) -> Image.Image:
    if _is_16_bit(image):
        return _from_16_bit(name, image)
    if image.mode in _ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A").getextrema()
        if alpha != (255, 255):
            raise _transparent(name)
        return image.convert("RGB")
    if image.mode not in _DIRECT:
        raise DecodeError(
            f"{name} has the pixel format '{image.mode}', which has no standard value range. Save it as 8-bit RGB or gray.", "mode"
        )
    return image.convert("RGB") if image.mode == "CMYK" else image


def _is_16_bit(image: Image.Image) -> bool:
    return image.mode == "I" or image.mode.startswith("I;16")


def _several_frames(name: str) -> DecodeError:
    return DecodeError(f"{name} contains several frames or pages. Save the one you need as a separate file.", "frames")


def _damaged(name: str, error: Exception) -> DecodeError:
    return DecodeError(f"{name} is damaged or incomplete ({first_line(error)}). Download or copy it again.", "damaged")


def _transparent(name: str) -> DecodeError:
    return DecodeError(
        f"{name} has transparent pixels, so its colors depend on the background. Flatten it onto a background first.", "alpha"
    )


def _from_16_bit(name: str, image: Image.Image) -> Image.Image:
    """Convert 16-bit gray to 8 bits: 65535 becomes 255. A PNG may declare one value as transparent."""
    values = np.asarray(image).astype(np.int64)
    if (values == image.info.get("transparency")).any():
        raise _transparent(name)
    if values.min() < 0 or values.max() > 65535:
        raise DecodeError(f"{name} has 32-bit pixels outside 0..65535. Save it as 8-bit RGB or gray.", "mode")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _is_dicom(stream: BinaryIO) -> bool:
    """Tell whether an open file has the mark of DICOM after its preamble."""
    position = stream.tell()
    stream.seek(position + _DICOM_PREAMBLE)
    mark = stream.read(len(_DICOM_MAGIC))
    stream.seek(position)
    return mark == _DICOM_MAGIC


def _decode_dicom(name: str, stream: BinaryIO, max_pixels: int) -> Image.Image:
    """Decode to mode RGB or L: YBR and palettes converted, gray values windowed if the file has a window."""
    data = _pixel_attributes(name, stream)
    if missing := [key for key in ("Rows", "Columns", "PhotometricInterpretation", "PixelData") if key not in data]:
        raise DecodeError(f"{name} is a DICOM file without an image (it has no {', '.join(missing)}).", "not-an-image")
    if int(data.get("NumberOfFrames") or 1) > 1:
        raise _several_frames(name)
    photometric = str(data.PhotometricInterpretation)
    if photometric not in _PHOTOMETRIC:
        raise DecodeError(f"{name} has the DICOM pixel format '{photometric}'. Save it as 8-bit RGB or gray.", "mode")
    _check_size(name, (int(data.Columns), int(data.Rows)), max_pixels)
    values = _dicom_values(name, data)
    if photometric == "PALETTE COLOR":
        from pydicom.pixels import apply_color_lut

        colors = apply_color_lut(values, data)
        return Image.fromarray(_to_8_bit(colors, 8 * colors.dtype.itemsize))
    if photometric.startswith("MONOCHROME"):
        gray = _dicom_gray(values, data)
        return Image.fromarray(255 - gray if photometric == "MONOCHROME1" else gray)
    return Image.fromarray(_to_8_bit(values, int(data.BitsStored)))


def _pixel_attributes(name: str, stream: BinaryIO) -> FileDataset:
    try:
        import pydicom
    except ImportError:
        raise DecodeError(
            f"{name} is a DICOM file, and pydicom is not installed. Install it with: pip install 'medtokenbudget[dicom]'.",
            "not-an-image",
        ) from None
    try:
        return pydicom.dcmread(stream, specific_tags=list(_PIXEL_ATTRIBUTES))
    except MemoryError:
        raise
    except Exception:
        raise DecodeError(f"{name} has a damaged DICOM header. Download or copy it again.", "damaged") from None


def _dicom_values(name: str, data: FileDataset) -> np.ndarray:
    syntax = data.file_meta.TransferSyntaxUID
    try:
        return np.asarray(data.pixel_array)
    except MemoryError:
        raise
    # pydicom and its plugins raise many types; their texts speak of pixels and plugins, never of the patient.
    except Exception as error:
        if syntax.is_compressed and "decompress" in str(error):
            raise DecodeError(
                f"{name} is compressed as {syntax.name}, for which no decoder is installed. Run "
                "`pip install pylibjpeg[all]`, or save it uncompressed.",
                "mode",
            ) from None
        raise DecodeError(
            f"{name} is damaged or incomplete (its pixels cannot be read). Download or copy it again.", "damaged"
        ) from None


def _dicom_gray(values: np.ndarray, data: FileDataset) -> np.ndarray:
    """Scale gray values to 8 bits; a window of the file decides what black and white are, else its bit depth."""
    from pydicom.pixels import apply_modality_lut, apply_windowing

    bits = int(data.BitsStored)
    signed = bool(int(data.get("PixelRepresentation", 0)))
    low: float = -(1 << (bits - 1)) if signed else 0
    high = low + (1 << bits) - 1
    if "WindowCenter" in data and "WindowWidth" in data:
        # Windowing maps to the range of the stored values, after rescaling.
        values = apply_windowing(apply_modality_lut(values, data), data)
        slope, intercept = float(data.get("RescaleSlope", 1)), float(data.get("RescaleIntercept", 0))
        low, high = low * slope + intercept, high * slope + intercept
    return np.clip(np.rint((values.astype(np.float64) - low) * 255 / (high - low)), 0, 255).astype(np.uint8)


def _to_8_bit(values: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return values.astype(np.uint8)
    return np.rint(values.astype(np.float64) * 255 / ((1 << bits) - 1)).astype(np.uint8)
