"""DICOM files to Pillow images, with the extra `dicom`. Its own file because a DICOM file is a patient's record with pixels in it:
only the attributes that describe the pixels are ever read, so that names, numbers and dates cannot reach an output or a log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from pydicom.dataset import FileDataset

SUFFIXES = frozenset({".dcm", ".dicom"})
PREAMBLE, MAGIC = 128, b"DICM"
PHOTOMETRIC = ("RGB", "MONOCHROME1", "MONOCHROME2", "PALETTE COLOR", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
PIXEL_ATTRIBUTES = (
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "PlanarConfiguration",
    "NumberOfFrames",
    "Rows",
    "Columns",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "WindowCenter",
    "WindowWidth",
    "VOILUTFunction",
    "RescaleIntercept",
    "RescaleSlope",
    "RedPaletteColorLookupTableDescriptor",
    "GreenPaletteColorLookupTableDescriptor",
    "BluePaletteColorLookupTableDescriptor",
    "RedPaletteColorLookupTableData",
    "GreenPaletteColorLookupTableData",
    "BluePaletteColorLookupTableData",
    "PixelData",
)


class DicomError(Exception):
    """Why a DICOM file cannot be shown: the rest of a sentence that starts with its name, and a kind of `DecodeError`."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.kind = kind


def is_dicom(stream: BinaryIO) -> bool:
    """Whether an open file has the mark of DICOM after its preamble."""
    position = stream.tell()
    stream.seek(position + PREAMBLE)
    found = stream.read(len(MAGIC))
    stream.seek(position)
    return found == MAGIC


class DicomImage:
    """The image in an open DICOM file: `size` from its header, `pixels()` on request.

    Raises:
        DicomError: There is no single image in it, or pydicom is not installed.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.data = _attributes(stream)
        missing = [name for name in ("Rows", "Columns", "PhotometricInterpretation", "PixelData") if name not in self.data]
        if missing:
            raise DicomError(f"is a DICOM file without an image (it has no {', '.join(missing)}).", "not-an-image")
        if int(self.data.get("NumberOfFrames") or 1) > 1:
            raise DicomError("contains several frames or pages. Save the one you need as a separate file.", "frames")
        self.photometric = str(self.data.PhotometricInterpretation)
        if self.photometric not in PHOTOMETRIC:
            raise DicomError(f"has the DICOM pixel format '{self.photometric}'. Save it as 8-bit RGB or gray.", "mode")
        self.size = (int(self.data.Columns), int(self.data.Rows))

    def pixels(self) -> Image.Image:
        """The image in mode RGB or L: YBR and palettes converted, gray values windowed if the file has a window."""
        from pydicom.pixels import apply_color_lut

        values = self._decoded()
        if self.photometric == "PALETTE COLOR":
            colors = apply_color_lut(values, self.data)
            return Image.fromarray(_to_8_bit(colors, 8 * colors.dtype.itemsize))
        if self.photometric.startswith("MONOCHROME"):
            return Image.fromarray(self._gray(values))
        return Image.fromarray(_to_8_bit(values, int(self.data.BitsStored)))

    def _decoded(self) -> np.ndarray:
        syntax = self.data.file_meta.TransferSyntaxUID
        try:
            return np.asarray(self.data.pixel_array)
        except MemoryError:
            raise
        # pydicom and its plugins raise many types; their texts speak of pixels and plugins, never of the patient.
        except Exception as error:
            if syntax.is_compressed and "decompress" in str(error):
                raise DicomError(
                    f"is compressed as {syntax.name}, for which no decoder is installed. Run "
                    "`pip install pylibjpeg[all]`, or save it uncompressed.",
                    "mode",
                ) from None
            raise DicomError(
                "is damaged or incomplete (its pixels cannot be read). Download or copy it again.", "damaged"
            ) from None

    def _gray(self, values: np.ndarray) -> np.ndarray:
        """Gray values as 8 bits, dark to bright; a window of the file decides what black and white are, else its bit depth."""
        from pydicom.pixels import apply_modality_lut, apply_windowing

        bits = int(self.data.BitsStored)
        if "WindowCenter" in self.data and "WindowWidth" in self.data:
            # Windowing maps to the range of the stored values, after rescaling.
            shown = apply_windowing(apply_modality_lut(values, self.data), self.data).astype(np.float64)
            low, high = _range(bits, self.data)
            slope, intercept = float(self.data.get("RescaleSlope", 1)), float(self.data.get("RescaleIntercept", 0))
            low, high = low * slope + intercept, high * slope + intercept
        else:
            shown, (low, high) = values.astype(np.float64), _range(bits, self.data)
        gray = np.clip(np.rint((shown - low) * 255 / (high - low)), 0, 255).astype(np.uint8)
        return 255 - gray if self.photometric == "MONOCHROME1" else gray


def _attributes(stream: BinaryIO) -> FileDataset:
    """The attributes that describe the pixels, and no others."""
    try:
        import pydicom
    except ImportError:
        raise DicomError(
            "is a DICOM file, and pydicom is not installed. Install it with: pip install 'medtokenbudget[dicom]'.", "not-an-image"
        ) from None
    try:
        return pydicom.dcmread(stream, specific_tags=list(PIXEL_ATTRIBUTES))
    except MemoryError:
        raise
    except Exception:
        raise DicomError("has a damaged DICOM header. Download or copy it again.", "damaged") from None


def _range(bits: int, data: Any) -> tuple[float, float]:
    """Smallest and largest stored value."""
    if int(data.get("PixelRepresentation", 0)):
        return float(-(1 << (bits - 1))), float((1 << (bits - 1)) - 1)
    return 0.0, float((1 << bits) - 1)


def _to_8_bit(values: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return values.astype(np.uint8)
    return np.rint(values.astype(np.float64) * 255 / ((1 << bits) - 1)).astype(np.uint8)
