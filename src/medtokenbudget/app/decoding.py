"""Decoding of uploads within a time limit.

Ordinary files are decoded in place: small JPEG and PNG files take at most a second or two, because their bytes, pixels and scans
are bounded. All others go to a process of their own, which is ended when the time is up: no file, however it was made, can hold the
server.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

from PIL import Image

from medtokenbudget.data.decode import DecodeError, decode_image, decode_mask
from medtokenbudget.errors import WorkError
from medtokenbudget.workers import end_with_parent

Kind = Literal["image", "mask"]
IN_PLACE_BYTES = 2_000_000
"""Largest JPEG or PNG that is decoded in place; the slowest found, a PNG of empty chunks, takes half a second per megabyte."""
IN_PLACE = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")
START_SECONDS = 120.0
_NAMES = {"image": "The image", "mask": "The mask"}


class Decoder:
    """Decodes uploads, each within `seconds`. Thread-safe; the process starts when it is first needed.

    Args:
        seconds: Time limit for one file.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def decode(self, data: bytes, kind: Kind, max_pixels: int) -> Image.Image:
        """Read the bytes of a file as `decode_image` or `decode_mask` does.

        Raises:
            DecodeError: The file cannot be read, or not within the time limit (kind 'too-slow').
        """
        if data.startswith(IN_PLACE) and len(data) <= IN_PLACE_BYTES:
            return _decode(data, kind, max_pixels)
        with self._lock:
            connection = self._started()
            try:
                connection.send_bytes(json.dumps([kind, max_pixels]).encode())
                connection.send_bytes(data)
                if not connection.poll(self.seconds):
                    raise DecodeError(
                        f"{_NAMES[kind]} takes more than {self.seconds:g} s to decode. Save it as a plain JPEG or PNG.", "too-slow"
                    )
                answer = json.loads(connection.recv_bytes())
                if "error" in answer:
                    raise DecodeError(answer["error"], answer["kind"])
                return Image.frombytes(answer["mode"], tuple(answer["size"]), connection.recv_bytes())
            except (OSError, EOFError):
                self._end()
                message = f"{_NAMES[kind]} ended the process that decoded it: it is damaged, or too large for memory."
                raise DecodeError(message, "damaged") from None
            except DecodeError as error:
                if error.kind == "too-slow":
                    self._end()
                raise

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _started(self) -> Connection:
        if self._process is None or self._connection is None or not self._process.is_alive():
            self._end()
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, os.getpid()), name="mtb-decoder", daemon=True)
            self._process.start()
            theirs.close()
            try:
                ready = self._connection.poll(START_SECONDS) and self._connection.recv_bytes()
            except (OSError, EOFError):
                ready = False
            if not ready:
                self._end()
                raise WorkError("The process that decodes images does not start. Free some memory and restart the server.")
        return self._connection

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _decode(data: bytes, kind: Kind, max_pixels: int) -> Image.Image:
    return decode_image(data, max_pixels) if kind == "image" else decode_mask(data, max_pixels)


def _serve(connection: Connection, parent: int) -> None:
    """The other process. It answers with JSON and pixels, never pickled objects: a file that takes it over cannot get out of it."""
    end_with_parent(parent)
    connection.send_bytes(b"ready")
    while True:
        try:
            kind, max_pixels = json.loads(connection.recv_bytes())
            data = connection.recv_bytes()
        except EOFError:
            return
        try:
            image = _decode(data, kind, max_pixels)
        except DecodeError as error:
            connection.send_bytes(json.dumps({"error": str(error), "kind": error.kind}).encode())
            continue
        connection.send_bytes(json.dumps({"mode": image.mode, "size": image.size}).encode())
        connection.send_bytes(image.tobytes())
