"""Files that are broken in one place: what the tests of bad input make and change."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from medtokenbudget.files import write_sealed


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


PLAIN = Image.effect_noise((64, 48), 60).convert("RGB")
CLEAR = Image.new("RGBA", (8, 8), (255, 0, 0, 100))
FRAMES = {"save_all": True, "append_images": [PLAIN.rotate(90)]}


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def claims(width: int, height: int) -> bytes:
    """A PNG that claims a size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file of the product with a fitting checksum, as somebody who edits it on purpose would."""
    values = json.loads(path.read_text())
    del values["checksum"]
    change(values)
    write_sealed(path, values)


NESTED = b'{"a":' * 50_000
