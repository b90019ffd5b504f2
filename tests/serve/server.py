"""A real server in a thread, and files to upload."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from PIL import Image

from medtokenbudget.model import MedTokenBudget
from medtokenbudget.serve.server import create_app, server_config
from medtokenbudget.serve.service import Service
from tests.small_model import BASELINES, small_model


@dataclass(frozen=True)
class Server:
    """Where it listens, and its process id."""

    url: str
    pid: int
    model: MedTokenBudget | None = None


@contextmanager
def running_here(service: Service, connections: int = 100, **options: Any) -> Iterator[Server]:
    """Run the application of `mtb serve` in a thread of this process, without the start-up time."""
    config = server_config(create_app(service, **options), connections)
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Server(f"http://127.0.0.1:{port}", os.getpid(), service.model)
    finally:
        server.should_exit = True
        thread.join(30)


def address_of(process: subprocess.Popen[str]) -> str:
    """Read the output of a starting server until it prints its address."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(r"Explorer: (http://\S+)", line):
            return found[1]
    raise AssertionError(f"The server did not start:\n{''.join(seen)}")


def saved_model(folder: Path, baselines: tuple[str, ...] = BASELINES) -> Path:
    return small_model(folder / "backbone", baselines).save_pretrained(folder / "model")


def picture(width: int = 120, height: int = 90, kind: str = "JPEG", seed: int = 0) -> bytes:
    """Skin-colored noise with a dark disc a third of the width right of the left edge."""
    generator = np.random.default_rng(seed)
    pixels = np.array([224, 172, 150]) + generator.normal(0, 8, (height, width, 3))
    pixels[disc(width, height)] = (90, 55, 45)
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, format=kind)
    return stream.getvalue()


def disc(width: int, height: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return (y - height / 2) ** 2 + (x - width / 3) ** 2 < (0.3 * height) ** 2


def mask(width: int = 120, height: int = 90) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(disc(width, height).astype(np.uint8) * 255).save(stream, format="PNG")
    return stream.getvalue()


def huge_png(side: int = 30_000) -> bytes:
    """A true black PNG with one bit per pixel: 112 MB of rows in about 110 kB."""
    squeeze = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    data = b"".join(squeeze.compress(row * 100) for _ in range(side // 100)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
