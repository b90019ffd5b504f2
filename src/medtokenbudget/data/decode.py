"""From a file to pixels: the only place where Pillow opens one, so that every image and mask is read under the same rules.

What cannot be read faithfully is refused by name (`DecodeError.kind`): nothing is guessed, cut or replaced.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from medtokenbudget.errors import RequestError

MAX_PIXELS = 100_000_000
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "GIF", "PPM", "JPEG2000")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".jp2"})
Source = Path | str | bytes | BinaryIO

_ORIENTATION = 0x0112
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

# `_refuse_large` below is stricter than Pillow's warning, which would only repeat it.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class DecodeError(RequestError):
    """A file that does not become pixels; `kind` is one of missing, folder, empty, not-an-image, damaged, too-large, frames,
    alpha, mode, mask-aspect."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.kind)


def decode_image(source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An RGB image, turned as its EXIF orientation says.

    Gray, palette, 1-bit, 16-bit gray (scaled by 255 / 65535) and CMYK are converted. An alpha channel is dropped when it is opaque
    everywhere and refused otherwise. Files of several frames are refused; the further frames of a camera's MPO are previews and
    are not looked at. Pillow's own limit of 178,956,970 pixels stays in force whatever `max_pixels` says.
    """
    return _decode(source, max_pixels).convert("RGB")


def decode_mask(source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A mask as 8-bit gray ("L", 0 to 255), turned as its EXIF orientation says; same rules as `decode_image`."""
    return _decode(source, max_pixels).convert("L")


def _decode(source: Source, max_pixels: int) -> Image.Image:
    """Pixels in one of the modes L, 1, P (without transparency), RGB, YCbCr, HSV."""
    name, stream = _open(source)
    try:
        image = _header(name, stream)
        _refuse_large(name, image.size, max_pixels)
        _refuse_frames(name, image)
        try:
            image = _verified(image, stream)
            image.load()
            orientation = image.getexif().get(_ORIENTATION, 1)
        # Plugins raise a dozen different types on damaged bytes; every one of them means the same to the reader.
        except Exception as error:
            raise DecodeError(f"{name} is damaged or cut short ({error}). Fetch the file again.", "damaged") from None
    finally:
        if isinstance(source, (Path, str)):
            stream.close()
    image = _plain_mode(name, image)
    return image.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else image


def _verified(image: Image.Image, stream: BinaryIO) -> Image.Image:
    """PNG carries checksums that Pillow looks at only when asked, and an image that was verified has to be opened again."""
    if image.format != "PNG":
        return image
    image.verify()
    stream.seek(0)
    return Image.open(stream, formats=FORMATS)


def _open(source: Source) -> tuple[str, BinaryIO]:
    if isinstance(source, bytes):
        if not source:
            raise DecodeError("the image is empty (0 bytes).", "empty")
        return "the image", io.BytesIO(source)
    if not isinstance(source, (str, Path)):
        return str(getattr(source, "name", None) or "the image"), source
    path = Path(source)
    try:
        folder, size = path.is_dir(), path.stat().st_size
        stream = None if folder or size == 0 else path.open("rb")
    except FileNotFoundError:
        raise DecodeError(f"{path} does not exist.", "missing") from None
    except (OSError, ValueError) as error:
        raise DecodeError(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}.", "missing") from None
    if folder:
        raise DecodeError(f"{path} is a folder, not an image.", "folder")
    if stream is None:
        raise DecodeError(f"{path} is empty (0 bytes). Fetch the file again.", "empty")
    return str(path), stream


def _header(name: str, stream: BinaryIO) -> Image.Image:
    try:
        return Image.open(stream, formats=FORMATS)
    except Image.DecompressionBombError:
        raise DecodeError(f"{name} has far more pixels than allowed. Reduce it first.", "too-large") from None
    except Image.UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise DecodeError(
            f"{name} is not an image in a format that is read here ({kinds}), or its header is damaged.", "not-an-image"
        ) from None
    except Exception as error:
        raise DecodeError(f"{name} has a damaged header ({error}). Fetch the file again.", "damaged") from None


def _refuse_large(name: str, size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise DecodeError(
            f"{name} has {width} x {height} pixels, more than the {max_pixels:,} allowed. Reduce it first.", "too-large"
        )
    if width < 1 or height < 1:
        raise DecodeError(f"{name} has no pixels ({width} x {height}).", "damaged")


def _refuse_frames(name: str, image: Image.Image) -> None:
    try:
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    except Exception as error:
        raise DecodeError(f"{name} is damaged or cut short ({error}). Fetch the file again.", "damaged") from None
    if frames > 1:
        raise DecodeError(f"{name} holds {frames} frames or pages. Save the one that is meant as a file of its own.", "frames")


def _plain_mode(name: str, image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bit(name, image)
    if image.mode in _ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        alpha = image.getchannel("A").getextrema()
        if alpha != (255, 255):
            raise _transparent(name)
        return image.convert("RGB")
    if image.mode not in _DIRECT:
        raise DecodeError(
            f"{name} has the pixel format '{image.mode}', which has no agreed range. Save it as 8-bit RGB or gray.", "mode"
        )
    return image.convert("RGB") if image.mode == "CMYK" else image


def _transparent(name: str) -> DecodeError:
    return DecodeError(
        f"{name} has transparent pixels, and what lies behind them is not known. Flatten it on a background first.", "alpha"
    )


def _from_16_bit(name: str, image: Image.Image) -> Image.Image:
    """Gray of 16 bits to 8 by the range of the format: 65535 becomes 255. A PNG may name one value that is transparent."""
    values = np.asarray(image).astype(np.int64)
    if (values == image.info.get("transparency")).any():
        raise _transparent(name)
    if values.min() < 0 or values.max() > 65535:
        raise DecodeError(f"{name} has 32-bit pixels outside 0..65535. Save it as 8-bit RGB or gray.", "mode")
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
